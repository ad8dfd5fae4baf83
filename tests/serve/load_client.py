"""Run by test_load.py: many streams at a time from a process of its own. Prints one JSON line."""

import asyncio
import json
import sys
import time
from collections import Counter

import openai

TOKENS = 40


async def load(url: str, model: str, streams: int, seconds: float) -> dict[str, object]:
    outcomes: Counter[str] = Counter()
    first: list[float] = []
    until = time.monotonic() + seconds
    # one connection each, and none of the client's own retries: every refusal is counted
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    async def one(number: int) -> None:
        while time.monotonic() < until:
            began, seen = time.monotonic(), False
            try:
                parts = await client.completions.create(
                    model=model, prompt=f"Text {number}", max_tokens=TOKENS, seed=number, stream=True
                )
                async for _ in parts:
                    if not seen:
                        first.append(time.monotonic() - began)
                        seen = True
                    outcomes["pieces"] += 1
                outcomes["done"] += 1
            except openai.RateLimitError as error:
                outcomes["429"] += 1
                await asyncio.sleep(min(1.0, float(error.response.headers["retry-after"])))
            except Exception as error:
                outcomes[f"{type(error).__name__}: {error.__cause__ or error!r}"[:200]] += 1

    began = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(streams)))
    took = time.monotonic() - began
    first.sort()
    done = outcomes["done"]
    return {
        "streams": streams,
        "seconds": took,
        "texts": done,
        "refused_429": outcomes.pop("429", 0),
        "errors": {name: count for name, count in outcomes.items() if name not in ("pieces", "done")},
        "pieces_per_second": outcomes["pieces"] / took,
        "first_piece_seconds": {f"p{share}": first[len(first) * share // 100] for share in (50, 95, 99)},
    }


if __name__ == "__main__":
    address, model, streams, seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(load(address, model, int(streams), float(seconds)))))
