import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maglev.errors import RequestError
from maglev.inference.sampling import Draw, Sampling, next_token, next_tokens, penalise
from maglev.inference.streaming import TextStream

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))


def drawn(sampling: Sampling, count: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return [next_token(LOGITS, sampling, generator) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert set(drawn(Sampling(temperature=0))) == {1}


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-12])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    assert set(drawn(Sampling(temperature=temperature), 20)) == {1}


def test_rows_draw_together_what_each_draws_alone() -> None:
    """Whatever their samplings are, and whoever draws beside them."""
    samplings = [
        Sampling(),
        Sampling(temperature=0),
        Sampling(0.5, top_k=3),
        Sampling(1.5, top_p=0.7),
        Sampling(min_p=0.1),
    ]
    samplings += [Sampling(repetition_penalty=3.0), Sampling(temperature=0, repetition_penalty=50.0)]
    logits = torch.randn(200, len(samplings) + 1, 61, generator=torch.Generator().manual_seed(1))

    def draws() -> list[Draw]:
        return [Draw(each, torch.Generator().manual_seed(row), [row, 7]) for row, each in enumerate(samplings)]

    together, alone = draws(), draws()
    for step in logits:
        found = next_tokens(step, [*together, None])
        assert found[:-1] == [next_token(own, *draw) for own, draw in zip(step, alone)]
        assert found[-1] == int(step[-1].argmax())


def test_the_widest_limits_change_nothing() -> None:
    assert drawn(Sampling(top_k=10**30), 50) == drawn(Sampling(), 50)


def test_draws_follow_the_probabilities() -> None:
    tokens = drawn(Sampling(), 4000)
    shares = [tokens.count(token) / len(tokens) for token in range(4)]
    # four standard deviations of a share of 4000 draws
    assert shares == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=4 * math.sqrt(0.25 / 4000))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), {1}),
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_k=99), {0, 1, 2, 3}),
        (Sampling(top_p=0.39), {1}),
        (Sampling(top_p=0.41), {1, 3}),
        (Sampling(top_p=0.95), {0, 1, 2, 3}),
        (Sampling(min_p=0.7), {1, 3}),
        (Sampling(min_p=1.0), {1}),
        # top_p counts what top_k left: 0.4 of 0.7 is more than half
        (Sampling(top_k=2, top_p=0.5), {1}),
    ],
)
def test_only_the_tokens_that_a_limit_keeps_are_drawn(sampling: Sampling, kept: set[int]) -> None:
    assert set(drawn(sampling)) == kept


@given(
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 9),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
)
@example(temperature=1.0, top_k=1, top_p=5e-324, min_p=0.0, repetition_penalty=1.0)
@settings(deadline=None)
def test_whatever_is_allowed_draws_a_token(**values: float) -> None:
    """One row that could not would end all that are drawn with it."""
    sampling = Sampling(**values)  # type: ignore[arg-type]
    assert next_token(LOGITS, sampling, torch.Generator().manual_seed(0), [1, 2]) in range(4)


def test_a_seed_gives_the_same_draws() -> None:
    assert drawn(Sampling(), 50) == drawn(Sampling(), 50)


def test_repetition_penalty_lowers_what_came_lately_whatever_its_sign() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])
    assert penalise(logits, [0, 1, 1], 2.0).tolist() == [1.0, -4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]
    assert next_token(logits, Sampling(temperature=0, repetition_penalty=4.0), torch.Generator(), [0]) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", 1e9),
        ("temperature", math.inf),
        ("temperature", -math.inf),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", math.nan),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 2),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 1e-320),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", math.inf),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=name):
        Sampling(**{name: value})


def shown(pieces: list[bytes], stop: list[str] | str = ()) -> tuple[list[str], bool]:
    stream = TextStream(stop)
    out = [stream.feed(piece) for piece in pieces]
    return [*out, stream.feed(b"", final=True)], stream.stopped


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    emoji = "🚄".encode()
    assert shown([emoji[:1], emoji[1:3], emoji[3:], b"!"]) == (["", "", "🚄", "!", ""], False)


def test_a_character_that_never_ends_is_replaced_at_the_end() -> None:
    assert shown(["é".encode()[:1]]) == (["", "\ufffd"], False)


def test_a_stop_string_is_found_across_pieces_and_not_shown() -> None:
    assert shown([b"one E", b"N", b"D two"], "END") == (["one ", "", "", ""], True)


def test_what_only_began_like_a_stop_string_is_shown_after_all() -> None:
    assert shown([b"one E", b"N", b"ding"], "END") == (["one ", "", "ENding", ""], False)
    assert shown([b"one EN"], "END") == (["one ", "EN"], False)


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert shown([b"a<b>c"], ["c", "<b>"]) == (["a", ""], True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop"):
        TextStream([""])


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab🚄", max_size=20), stop=st.text("ab🚄", min_size=1, max_size=4), cuts=st.lists(st.integers(0, 60))
)
def test_any_cut_into_pieces_shows_the_text_up_to_the_stop(text: str, stop: str, cuts: list[int]) -> None:
    content = text.encode()
    edges = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    pieces = [content[a:b] for a, b in itertools.pairwise(edges)]
    out, stopped = shown(pieces, stop)
    assert "".join(out) == text.split(stop)[0]
    assert stopped == (stop in text)
