"""A hook of the site: what pages link to outside of docs/ comes along, at its own path in the repository.

Documents are written to be read in the repository as well, so they link to `../results/x.json` and
`../CONTRIBUTING.md`. Markdown becomes a page, a file is copied, and the links are turned to where they are.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
# pages of the site that lie outside of docs/
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")


def outside(target: str, folder: str) -> str | None:
    """The path in the repository of a link that leaves docs/ for a file that exists; `folder` is the page's."""
    path = posixpath.normpath(posixpath.join(folder, target))
    return None if path.startswith(("docs/", "..")) or not (ROOT / path).is_file() else path


def folder_of(file: File) -> str:
    """Of a page, in the repository."""
    return posixpath.dirname(file.src_uri if file.src_uri in PAGES else f"docs/{file.src_uri}")


def on_files(files: Files, config: Any) -> Files:
    # the page of results links to all of them once it is made
    for name in (*PAGES, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "results").glob("*.json")))):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for file in list(files.documentation_pages()):
        for match in LINK.finditer(file.content_string):
            path = outside(match[1], folder_of(file))
            if path is not None and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as they have to be in the site, where docs/ is the root and the rest lies beside its pages."""
    folder, here = folder_of(page.file), posixpath.dirname(page.file.src_uri)

    def turned(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        path = path.removeprefix("docs/") if path.startswith("docs/") else path
        known = files.get_file_from_path(path) is not None
        return (posixpath.relpath(path, here or ".") if known else match[1]) + (match[2] or "")

    return LINK.sub(turned, markdown)
