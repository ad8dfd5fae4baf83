"""What clients send, as OpenAI describes it, with the fields that this server adds."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from maglev.serve.sessions import SESSION_NAME


def whole(value: Any) -> Any:
    """Some clients write 1 as 1.0, which is an integer in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(whole)
Ids = list[Annotated[int, Field(ge=0)]]
Name = Annotated[str, Field(pattern=SESSION_NAME, description="Letters, digits, - and _.")]
SEED_MAX = (1 << 63) - 1


class Body(BaseModel):
    # what is misspelt or not there is an error, as at OpenAI, and no surprise
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class CompletionRequest(Body):
    model: str
    prompt: str | list[str] | Ids | list[Ids] | None = None
    max_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1), WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: bool | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-SEED_MAX - 1, le=SEED_MAX), WHOLE] | None = None
    user: str | None = None
    # of OpenAI's, accepted where they ask for nothing
    best_of: Annotated[int, WHOLE] | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # beyond OpenAI's: the limits that `maglev generate` knows, and states by name
    top_k: Annotated[int, Field(ge=0, le=1 << 31), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    memory: Annotated[bool | None, Field(description="Tell memory change and memory gate of each token.")] = None
    session: Annotated[Name | None, Field(description="Go on from this state.")] = None
    save_as: Annotated[Name | None, Field(description="Keep the state after the text under this name.")] = None


# for those that may be one of several things
GIVE = {
    "prompt": "give a text, a list of token ids, or a list of either",
    "stop": "give a text or a list of at most 16",
}


class ForkRequest(Body):
    to: Name


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorObject


# of every route, for its description
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "The request is wrong",
        401: "The API key is wrong or missing",
        403: "This host name is not served",
        404: "There is no such model, session or route",
        405: "The route has no such method",
        408: "The request took too long",
        409: "The session cannot be used or saved",
        413: "The body is too large",
        415: "The body is not JSON",
        429: "All slots and the queue are full",
    }.items()
}
