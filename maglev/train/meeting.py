"""Where ranks find each other, also when torchrun starts them again."""

import time
import uuid
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist


def fresh_store(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """A store for this start of the ranks alone.

    torchrun's own outlives them: after a restart it still holds the addresses of the ranks before, and no number
    that it gives tells one start from the next on all machines. So rank 0 draws a name for this one, and gives it to
    every rank that asks with a question of its own; what earlier ones asked is answered to nobody.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    own = uuid.uuid4().hex
    if rank == 0:
        name = own
        answer_until_all_came(store, name, world, timeout)
    else:
        store.set(f"maglev/question/{rank}", own)
        name = store.get(f"maglev/answer/{own}").decode()
        store.add(f"maglev/came/{name}", 1)
    return dist.PrefixStore(name, store)


def gather_by_store(store: dist.Store, rank: int, world: int, key: str, text: str) -> list[str]:
    """Of every rank, in rank order. Rank 0 returns last: the store may end with it."""
    store.set(f"{key}/{rank}", text)
    texts = [content.decode() for content in store.multi_get([f"{key}/{other}" for other in range(world)])]
    if store.add(f"{key}/read", 1) == world:
        store.set(f"{key}/read by all", "yes")
    if rank == 0:
        store.wait([f"{key}/read by all"])
    return texts


def answer_until_all_came(store: dist.Store, name: str, world: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    answered: set[str] = set()
    while store.add(f"maglev/came/{name}", 0) < world - 1:
        asking = [key for key in (f"maglev/question/{rank}" for rank in range(1, world)) if store.check([key])]
        for question in {store.get(key).decode() for key in asking} - answered:
            store.set(f"maglev/answer/{question}", name)
            answered.add(question)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all came within {timeout.total_seconds():.0f} s")
        time.sleep(0.005)


class LastWords:
    """What a rank that fails alone leaves for rank 0 to tell."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world

    def leave(self, text: str) -> None:
        # where the store is gone too there is nobody left to read it
        with suppress(Exception):
            self.store.set(self.key(self.rank), text)

    def found(self) -> str:
        """Those of the first other rank that has some, else nothing."""
        with suppress(Exception):
            for rank in range(self.world):
                if rank != self.rank and self.store.check([self.key(rank)]):
                    return f"rank {rank}: {self.store.get(self.key(rank)).decode()}"
        return ""

    def key(self, rank: int) -> str:
        return f"maglev/last-words/{rank}"
