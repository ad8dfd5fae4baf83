"""OpenAI's own client, as it is, against a running server."""

import asyncio
from itertools import pairwise

import openai
import pytest

from maglev.inference.engine import LanguageModel
from tests.serve.running import NAME, Running

PROMPT = "The list of all"


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def written(lm: LanguageModel, prompt: str = PROMPT, **options: object) -> str:
    return "".join(lm.generate(prompt, **options))  # type: ignore[arg-type]


def test_an_idle_connection_is_closed_by_the_client() -> None:
    """Else the server closes it just when it is used again, and the request is lost."""
    from openai._constants import DEFAULT_CONNECTION_LIMITS

    from maglev.serve.run import IDLE_SECONDS

    assert DEFAULT_CONNECTION_LIMITS.keepalive_expiry is not None
    assert 2 * DEFAULT_CONNECTION_LIMITS.keepalive_expiry < IDLE_SECONDS


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == NAME and model.object == "model" and model.created > 0
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another/one")
    assert caught.value.code == "model_not_found"


def test_a_completion_is_the_engines_text(client: openai.OpenAI, lm: LanguageModel) -> None:
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=30, seed=5, temperature=0.8)
    assert found.object == "text_completion" and found.model == NAME and found.id.startswith("cmpl-")
    (choice,) = found.choices
    assert choice.text == written(lm, max_tokens=30, seed=5, temperature=0.8)
    assert choice.finish_reason == "length" and choice.logprobs is None and choice.index == 0
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(lm.tokenizer.encode(PROMPT))
    assert found.usage.completion_tokens == 30 and found.usage.total_tokens == found.usage.prompt_tokens + 30


def test_defaults_are_those_of_openai(client: openai.OpenAI) -> None:
    found = [client.completions.create(model=NAME, prompt="a") for _ in range(3)]
    assert all(each.usage is not None and each.usage.completion_tokens <= 16 for each in found)
    # without a seed, texts differ
    assert len({each.choices[0].text for each in found}) > 1


def test_a_stream_has_the_same_text(client: openai.OpenAI, lm: LanguageModel) -> None:
    parts = list(client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, seed=2, stream=True))
    assert "".join(part.choices[0].text for part in parts) == written(lm, max_tokens=20, seed=2)
    assert len(parts) > 5 and {part.id for part in parts} == {parts[0].id}
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all(part.usage is None for part in parts)


def test_a_stream_with_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    parts = list(
        client.completions.create(
            model=NAME, prompt="a", max_tokens=4, temperature=0, stream=True, stream_options=options
        )  # type: ignore[call-overload]
    )
    assert not parts[-1].choices and parts[-1].usage.completion_tokens == 4
    assert all(part.usage is None for part in parts[:-1])


def test_a_stop_string_ends_a_text_and_is_not_shown(client: openai.OpenAI, lm: LanguageModel) -> None:
    whole = written(lm, max_tokens=40, seed=3)
    stop = whole[7:10]
    for stream in (False, True):
        found = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=40, seed=3, stop=[stop, "§§"], stream=stream, logprobs=0
        )
        choices = [part.choices[0] for part in found] if stream else [found.choices[0]]
        assert "".join(choice.text for choice in choices) == whole.partition(stop)[0]
        assert choices[-1].finish_reason == "stop"
        offsets = [at for choice in choices for at in choice.logprobs.text_offset]
        assert offsets and max(offsets) < whole.index(stop)


def test_the_end_of_a_document_is_a_stop(server: Running, lm: LanguageModel) -> None:
    for seed in range(200):
        with lm.generate("a", max_tokens=60, seed=seed, temperature=1.9) as text:
            expected = "".join(text)
        if text.finished == "end":
            break
    else:
        pytest.skip("no document ended")
    (choice,) = server.complete(prompt="a", max_tokens=60, seed=seed, temperature=1.9)["choices"]
    assert choice["text"] == expected and choice["finish_reason"] == "stop"


def test_logprobs(client: openai.OpenAI, lm: LanguageModel) -> None:
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3)
    choice = found.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
    assert "".join(logprobs.tokens or ()) == choice.text
    state = lm.read(PROMPT)
    for token, logprob, top in zip(logprobs.tokens or (), logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        expected = lm.next_logits(state).double().log_softmax(-1)
        assert logprob == pytest.approx(float(expected.max()), abs=1e-4)
        # greedy: the likeliest is the one that was written
        assert len(top) == 3 and max(top, key=top.__getitem__) == token
        lm.step_through([int(expected.argmax())], state)
    assert [choice.text[a:b] for a, b in pairwise([*logprobs.text_offset, None])] == logprobs.tokens


def test_echo_scores_the_prompt(client: openai.OpenAI, lm: LanguageModel) -> None:
    """As evaluation harnesses ask for it: no new tokens, logprobs of what was sent."""
    prompt = PROMPT + " things, and of naïve ones 🧪, which goes on beyond a chunk"
    tokens = lm.tokenizer.encode(prompt)
    for given in (prompt, tokens, [lm.tokenizer.bos_id, *tokens]):
        found = client.completions.create(model=NAME, prompt=given, max_tokens=0, echo=True, logprobs=1)
        choice = found.choices[0]
        assert choice.text == prompt and choice.logprobs is not None and choice.finish_reason == "length"
        state, expected = lm.read(""), []
        for token in tokens:
            expected.append(float(lm.next_logits(state).double().log_softmax(-1)[token]))
            lm.step_through([token], state)
        assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
        assert choice.logprobs.text_offset and choice.logprobs.text_offset[:2] == [
            0,
            len(lm.tokenizer.decode(tokens[:1])),
        ]


def test_echo_goes_on_with_the_text(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, seed=1, logprobs=0)
    for stream in (False, True):
        found = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=8, seed=1, logprobs=0, echo=True, stream=stream
        )
        choices = [part.choices[0] for part in found] if stream else [found.choices[0]]
        assert "".join(choice.text for choice in choices) == PROMPT + plain.choices[0].text
        offsets = [at for choice in choices for at in choice.logprobs.text_offset]
        assert offsets[-len(plain.choices[0].logprobs.text_offset) :] == [
            len(PROMPT) + at for at in plain.choices[0].logprobs.text_offset
        ]


def test_several_prompts_with_several_texts(client: openai.OpenAI, lm: LanguageModel) -> None:
    """Choice i of a prompt is the text of seed + i."""
    found = client.completions.create(model=NAME, prompt=[PROMPT, "b"], n=3, max_tokens=10, seed=7)
    expected = [written(lm, prompt, max_tokens=10, seed=seed) for prompt in (PROMPT, "b") for seed in (7, 8, 9)]
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == list(range(6))
    texts = [""] * 6
    for part in client.completions.create(model=NAME, prompt=[PROMPT, "b"], n=3, max_tokens=10, seed=7, stream=True):
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == expected


def test_more_texts_than_slots(client: openai.OpenAI) -> None:
    found = client.completions.create(model=NAME, prompt="a", n=16, max_tokens=5, seed=0, temperature=0)
    assert len({choice.text for choice in found.choices}) == 1 and len(found.choices) == 16


def test_what_this_server_adds(client: openai.OpenAI, lm: LanguageModel) -> None:
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3}
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, seed=4, top_p=0.9, extra_body=extra)
    assert found.choices[0].text == written(lm, max_tokens=20, seed=4, top_p=0.9, **extra)


def test_negative_seeds_are_seeds(client: openai.OpenAI) -> None:
    texts = {client.completions.create(model=NAME, prompt="a", seed=-1).choices[0].text for _ in range(2)}
    assert len(texts) == 1


def test_what_was_known_of_a_prompt_is_told(client: openai.OpenAI) -> None:
    def usage(prompt: str | list[str]) -> tuple[int, int]:
        found = client.completions.create(model=NAME, prompt=prompt, max_tokens=1).usage
        assert found is not None and found.prompt_tokens_details is not None
        return found.prompt_tokens_details.cached_tokens or 0, found.prompt_tokens

    prompt = "Nobody has asked for this text yet"
    cached, tokens = usage(prompt)
    # one replica of several may know it and the other not
    again = [usage([prompt, prompt]) for _ in range(4)]
    assert cached == 0 and max(again) == (2 * tokens, 2 * tokens)


def test_whole_numbers_may_have_a_point(server: Running) -> None:
    """JSON has no other integers; a client's language may write them so."""
    plain = server.text(prompt="a", max_tokens=3, seed=1, n=1, top_k=5)
    assert server.text(prompt="a", max_tokens=3.0, seed=1.0, n=1.0, top_k=5.0) == plain
    assert server.refused(400, prompt="a", max_tokens=1.5)["param"] == "max_tokens"
    assert server.refused(400, prompt="a", n=True)["param"] == "n"


def test_errors_are_those_of_openai(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-3.5-turbo-instruct", prompt="a")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=NAME, prompt="a", temperature=-1)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.completions.create(model=NAME, prompt="a", extra_body={"temprature": 1})
    assert unknown.value.param == "temprature"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.completions.create(model=NAME, prompt="a", presence_penalty=1)
    assert unsupported.value.param == "presence_penalty"
    with pytest.raises(openai.NotFoundError, match=r"/openapi\.json"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "a"}])


def test_a_text_is_the_same_alone_and_under_load(server: Running) -> None:
    """To the bit: the logprobs of a text do not show who else was served, nor in which slot it was."""
    asked = [{"prompt": f"{PROMPT} {'number ' * (index % 5)}{index}", "seed": index} for index in range(24)]

    async def ask(client: openai.AsyncOpenAI, fields: dict) -> tuple[str, list[float]]:
        found = await client.completions.create(model=NAME, max_tokens=40, logprobs=0, **fields)
        return found.choices[0].text, found.choices[0].logprobs.token_logprobs  # type: ignore[union-attr]

    async def both() -> tuple[list, list]:
        async with server.async_client() as client:
            alone = [await ask(client, fields) for fields in asked]
            return alone, await asyncio.gather(*(ask(client, fields) for fields in asked))

    alone, together = asyncio.run(both())
    assert alone == together
