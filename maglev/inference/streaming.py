"""Text that can be shown at once: whole characters, and nothing that may turn out to be a stop string."""

import codecs
from collections.abc import Iterable

from maglev.errors import RequestError
from maglev.inference.checks import items_of

# one text, several, or none
Stop = str | Iterable[str] | None


def stop_strings(stop: Stop) -> list[str]:
    found = [stop] if isinstance(stop, str) else items_of("stop", () if stop is None else stop, "texts")
    for text in found:
        if not isinstance(text, str):
            raise RequestError(f"a stop string is a {type(text).__name__}; it must be a text (str)")
        if not text:
            raise RequestError("a stop string is empty; leave it away or give it a character")
    return found


class TextStream:
    """Feed it the bytes of tokens; it gives back text that is safe to show. `stopped` says that a stop string came."""

    def __init__(self, stop: Stop = ()) -> None:
        self.stops = stop_strings(stop)
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""
        self.stopped = False

    def feed(self, piece: bytes, final: bool = False) -> str:
        if self.stopped:
            return ""
        self.held += self.decoder.decode(piece, final)
        cut = min((at for at in (self.held.find(stop) for stop in self.stops) if at >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            return self.release(cut)
        return self.release(len(self.held) if final else len(self.held) - self.suspicious())

    def suspicious(self) -> int:
        """Length of the longest end of the held text that some stop string begins with."""
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self.held)), longest, -1):
                if self.held.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def release(self, count: int) -> str:
        text, self.held = self.held[:count], self.held[count:]
        return text
