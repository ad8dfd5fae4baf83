"""The report's style sheet: light and dark, narrow and wide."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1d2430; --soft: #5a6472; --paper: #ffffff; --panel: #f5f7fa; --line: #dde2e9;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #9aa5b4; --paper: #14181f; --panel: #1c222c; --line: #313a47; }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; }
p, dd { max-width: 46rem; }
.cards {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .9rem;
  margin: 1.5rem 0 1rem;
}
.card {
  display: flex; flex-direction: column; padding: .9rem 1.1rem; border-radius: .6rem;
  background: var(--panel); border-left: .35rem solid var(--colour);
}
.card.lifted { border-left-style: dashed; }
.card.refined { border-left-style: dotted; }
.who, .unit { color: var(--soft); font-size: .88rem; }
.who b { color: var(--ink); }
.value { font-size: 2.1rem; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }
.verdict { font-size: 1.08rem; margin: .4rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 1rem 0; }
dt { font-weight: 650; }
dd { margin: 0; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .4rem .9rem; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--soft); font-weight: 500; font-size: .88rem; }
tbody th { font-weight: 600; }
.facts th { color: var(--soft); font-weight: 500; white-space: nowrap; vertical-align: top; }
.facts td { text-align: left; overflow-wrap: anywhere; }
.plots {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); gap: 1.25rem;
}
.plots h2 { grid-column: 1 / -1; margin-bottom: -.5rem; }
figure { margin: 0; padding: 1rem 1.1rem; background: var(--panel); border-radius: .6rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { color: var(--soft); font-size: .88rem; margin-top: .6rem; }
blockquote { margin: 1rem 0; padding: .8rem 1.1rem; background: var(--panel); border-radius: .6rem; }
blockquote p { margin: 0 0 .4rem; }
pre {
  margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .88rem/1.5 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
}
section > pre { padding: .8rem 1.1rem; background: var(--panel); border-radius: .6rem; }
"""
