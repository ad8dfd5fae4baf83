from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from maglev.data.shards import INDEX, TOKENIZER, SplitWriter, TokenData, index_of, open_data
from maglev.data.tokenizer import Tokenizer
from maglev.files import write_json

TEXTS = [
    "The cat sat on the mat.\nIt didn't rain in 1984.\n",
    "A dog ran after the cat; the cat ran off.\n",
] * 4

WriteData = Callable[..., TokenData]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


@pytest.fixture(scope="session")
def write_data(tokenizer: Tokenizer) -> WriteData:
    """Writes documents, given as tokens without BOS, as a data folder."""

    def write(folder: Path, documents: Sequence[Sequence[int]], shard_tokens: int = 10**8) -> TokenData:
        folder.mkdir(parents=True, exist_ok=True)
        writers = {name: SplitWriter(folder, name, tokenizer, shard_tokens) for name in ("train", "validation")}
        for document in documents:
            writers["train"].add(document, len(tokenizer.decode_bytes(document)))
        writers["validation"].add([5], 1)
        tokenizer.save(folder / TOKENIZER)
        write_json(folder / INDEX, index_of(tokenizer, {name: writer.finish() for name, writer in writers.items()}))
        return open_data(folder)

    return write
