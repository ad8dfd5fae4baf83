"""From raw text to rows of tokens: tokenizer, sources, shards on disk, the row plan. A leaf: no torch."""

from maglev.data.loader import Batch, Loader
from maglev.data.packing import RowPlan
from maglev.data.prepare import prepare
from maglev.data.shards import Shard, Split, TokenData, open_data
from maglev.data.sources import iterate_documents, resolve_source
from maglev.data.tokenizer import BOS, Tokenizer

__all__ = [
    "BOS",
    "Batch",
    "Loader",
    "RowPlan",
    "Shard",
    "Split",
    "TokenData",
    "Tokenizer",
    "iterate_documents",
    "open_data",
    "prepare",
    "resolve_source",
]
