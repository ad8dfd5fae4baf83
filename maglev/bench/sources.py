"""Which code a result is of."""

import hashlib
from pathlib import Path


def source_fingerprint() -> str:
    """Of the package's sources: results of other ones need not be the same."""
    sources = sorted(Path(__file__).resolve().parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
