"""The requests of a stream: what each may ask for, and what the decoding loop needs of it."""

# L prompt tokens

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.generation import StoppingCriteriaList

from .acceptance_rules import ACCEPTANCE_RULES
from .generate_arguments import check_generation_config, check_limits, check_prompts, input_device, num_embeddings
from .generation_config_d2f import D2FGenerationConfig
from .generation_options import is_integer
from .gradient_mode import keeps_nothing
from .logits_process_d2f import looks_at_scores_alone, refuse_undeclared
from .pipelined_decoding import ROW_OPTIONS
from .sampler import Sampler

# Options that concern the whole batch. A request cannot have its own.
_OF_THE_STREAM = (
    "decoding",
    "block_size",
    "acceptance_rule",
    *dict.fromkeys(name for names in ACCEPTANCE_RULES.values() for name in names),
    "sub_block_size",
    "first_token_alone",
    "num_branches",
    "remask_threshold",
    "cache_implementation",
)
_OF_THE_OUTPUT = ("output_scores", "output_logits", "output_trace", "return_dict_in_generate")


class PreparedRequest(NamedTuple):
    """A request as the decoding loop needs it.

    Args:
        prompt (`torch.LongTensor` of shape `(L,)`): On the host.
        max_new_tokens (`int`): Response tokens at most.
        min_new_tokens (`int`): Response tokens before the first EOS.
        eos_token_ids (`list[int]`): Tokens that end the response.
        stopping_criteria (`StoppingCriteriaList`): Those of this request alone.
        sampler (`Sampler`): Chooses its tokens.
        row_options (`dict[str, Any]`): Values of [`~pipelined_decoding.ROW_OPTIONS`].
        num_return_sequences (`int`): Responses to the prompt.
        has_guests (`bool`): Somebody else's code, such as a logits processor of the caller, gets tensors.
    """

    prompt: torch.LongTensor
    max_new_tokens: int
    min_new_tokens: int
    eos_token_ids: list[int]
    stopping_criteria: StoppingCriteriaList
    sampler: Sampler
    row_options: dict[str, Any]
    num_return_sequences: int = 1
    has_guests: bool = False


class RequestPreparer:
    """From a prompt and its options to a [`PreparedRequest`].

    Args:
        model: A block-diffusion model. Its configuration, device and `sampler_class` count.
        arguments_of (`Callable`): From prompts `(B, L)` and options to what `generate` would decode with.
        stream_options (`dict[str, Any]`): Options of the requests that do not say otherwise.
        stream_config (`D2FGenerationConfig`): The same, prepared.
        max_prompt_length, max_new_tokens (`int`): The most tokens that there is room for.
    """

    def __init__(
        self,
        model: Any,
        arguments_of: Callable[[torch.LongTensor, dict[str, Any]], dict[str, Any]],
        stream_options: dict[str, Any],
        stream_config: D2FGenerationConfig,
        max_prompt_length: int,
        max_new_tokens: int,
    ):
        self.model = model
        self.arguments_of = arguments_of
        self.stream_options = stream_options
        self.stream_config = stream_config
        self.max_prompt_length = max_prompt_length
        self.max_new_tokens = max_new_tokens
        self.shared_samplers: dict[tuple, Sampler] = {}  # by the options that they were made from
        self.plain: PreparedRequest | None = None  # that of requests without options, if only their prompts differ

    def __call__(self, input_ids: torch.LongTensor, options: dict[str, Any]) -> PreparedRequest:
        """Prepares the prompt `(L,)` with its own options.

        1. Check what needs no preparation.
        2. Own options before those of the stream. Where there are none, the last such request is taken again.
        3. What transformers prepares for this prompt alone.
        4. A sampler, which requests share where it depends on nothing but options.

        Raises:
            ValueError: for a prompt or an option that cannot be.
        """
        # 1. Checks.
        check_stream_prompt(input_ids, self.max_prompt_length)
        check_prompts(input_ids[None], None, num_embeddings(self.model))
        check_stream_options(options, of_request=True)

        # 2. Options.
        own = {name: value for name, value in options.items() if value is not None}
        if (config := own.pop("generation_config", None)) is not None:  # before the keywords of the stream
            check_generation_config("generation_config", config)
            values = {name: value for name, value in config.to_diff_dict().items() if not name.startswith("_")}
            values.pop("transformers_version", None)
            own = {**values, **own}
        limit = own.get("max_new_tokens", self.max_new_tokens)
        if self.plain is not None and own.keys() <= {"max_new_tokens"} and type(limit) is int:
            self._check_limit(limit)
            return self.plain._replace(prompt=input_ids.long().cpu(), max_new_tokens=limit)
        given = {**self.stream_options, **own}
        if "max_length" in own and "max_new_tokens" not in own:
            given.pop("max_new_tokens", None)
        seed = given.pop("seed", None)
        if seed is not None:
            given["generator"] = torch.Generator(device=input_device(self.model)).manual_seed(int(seed))

        # 3. Preparation.
        input_ids = input_ids[None].long()
        length = input_ids.shape[1]
        arguments = self.arguments_of(input_ids, given)
        config: D2FGenerationConfig = arguments["generation_config"]
        check_stream_config(config, self.stream_config)
        if seed is not None and (config.num_return_sequences or 1) > 1:
            raise ValueError(
                f"`seed` (got {seed}) is not supported with `num_return_sequences` (got "
                f"{config.num_return_sequences}) in a stream. Add the prompt several times, each with a seed."
            )
        limit = config.max_length - length
        self._check_limit(limit)
        check_limits(self.model, config, length, length)

        # 4. The sampler.
        processors = arguments["logits_processor"]
        if (config.num_return_sequences or 1) > 1:  # each response is asked about alone
            for processor in processors:
                refuse_undeclared(processor)
        sampler = self.model.sampler_class(config, processors, arguments.get("generator"))
        is_shared = "generator" not in own and seed is None and looks_at_scores_alone(processors)
        if is_shared:
            concerns_sampling = own.keys() - set(ROW_OPTIONS) - {"max_new_tokens", "max_length", "max_time"}
            key = tuple(sorted((name, repr(own[name])) for name in concerns_sampling))
            sampler = self.shared_samplers.setdefault(key, sampler)
        eos_token_ids = config._eos_token_tensor
        request = PreparedRequest(
            prompt=input_ids[0].cpu(),
            max_new_tokens=limit,
            min_new_tokens=(config.min_length or 0) - length,
            eos_token_ids=[] if eos_token_ids is None else eos_token_ids.tolist(),
            stopping_criteria=arguments["stopping_criteria"],
            sampler=sampler,
            row_options={name: getattr(config, name) for name in ROW_OPTIONS},
            num_return_sequences=config.num_return_sequences or 1,
            has_guests=not all(keeps_nothing(processor) for processor in processors),
        )
        counts_prompt = config.max_new_tokens is None or (config.min_length and config.min_new_tokens is None)
        if not own and is_shared and not counts_prompt and len(request.stopping_criteria) == 0:
            self.plain = request
        return request

    def _check_limit(self, limit: int) -> None:
        if not 1 <= limit <= self.max_new_tokens:
            raise ValueError(
                f"`max_new_tokens` of a request must be from 1 to the {self.max_new_tokens} of the stream, got "
                f"{limit}. Give the largest needed to the stream."
            )


def check_stream_options(options: dict[str, Any], of_request: bool = False) -> None:
    """Refuses arguments of `generate` that are not supported by a stream, or by a request of one."""
    if options.get("synced_gpus"):
        raise ValueError(
            "`synced_gpus` must be False: processes that answer different requests cannot stay in step. Use "
            "`generate`."
        )
    if options.get("streamer") is not None:
        raise ValueError(
            "`streamer` is not supported in a stream: each `StreamDecoder.step` gives the tokens of all responses. "
            "Leave it out, or use `generate`."
        )
    if options.get("attention_mask") is not None:
        raise ValueError("`attention_mask` is not used by a stream, where prompts come without padding. Leave it out.")
    for name in ("input_ids", "inputs"):
        if options.get(name) is not None:
            raise ValueError(f"`{name}` is no option of a stream, whose prompts come one by one. Leave it out.")
    if options.get("custom_generate") is not None:
        raise ValueError("`custom_generate` is not supported in a stream. Use `generate` for it.")
    seed = options.get("seed")
    if seed is not None and not (of_request and is_integer(seed)):
        raise ValueError(
            f"`seed` must be an integer, and an option of a request, got {seed!r}. A stream takes a `generator`."
        )
    if of_request:
        for name in ("use_cache", "compile_config", "verifier"):
            if options.get(name) is not None:
                raise ValueError(f"`{name}` concerns all requests. Give it to `open_stream`.")
    elif (options.get("num_return_sequences") or 1) > 1:
        raise ValueError(
            f"`num_return_sequences` (got {options['num_return_sequences']}) is not supported for all requests of a "
            "stream. Give it to `StreamDecoder.add`, or add a prompt several times: equal ones that are next to each "
            "other share their first forward."
        )


def check_stream_config(config: D2FGenerationConfig, of_stream: D2FGenerationConfig | None = None) -> None:
    """Refuses the prepared options of a stream, or of a request, that cannot be."""
    if config.decoding not in ("d2f", "autoregressive", "verified"):
        raise ValueError(
            f"`decoding` must be 'd2f', 'autoregressive' or 'verified' in a stream, got {config.decoding!r}. Leave it "
            "out."
        )
    for name in _OF_THE_OUTPUT:
        if getattr(config, name):
            raise ValueError(f"`{name}` is not supported in a stream. Use `generate` for it.")
    if of_stream is None:
        if (config.num_return_sequences or 1) > 1:
            check_stream_options({"num_return_sequences": config.num_return_sequences})
        return
    for name in _OF_THE_STREAM:
        own, common = getattr(config, name), getattr(of_stream, name)
        if own != common:
            raise ValueError(
                f"`{name}` concerns all requests of a stream and is {common!r} here, but a request asks for {own!r}. "
                "Leave it out, or give it to `open_stream`."
            )


def check_stream_prompt(input_ids: Any, max_prompt_length: int) -> None:
    """Refuses what is not one prompt that fits."""
    if not isinstance(input_ids, torch.Tensor):
        raise ValueError(
            "Each of `requests` (`input_ids`) must be a tensor of token ids, got "
            f"{type(input_ids).__name__}. Convert it."
        )
    if input_ids.dim() != 1 or not 1 <= len(input_ids) <= max_prompt_length:
        raise ValueError(
            f"Each of `requests` (`input_ids`) must be a prompt of 1 to {max_prompt_length} tokens "
            f"(`max_prompt_length`), got the shape {tuple(input_ids.shape)}. Give prompts one by one, without padding."
        )


def prompt_and_options(request: Any) -> tuple[torch.LongTensor, dict[str, Any]]:
    """A request of `generate_stream_batch` as `StreamDecoder.add` takes it."""
    prompt, options = request if isinstance(request, tuple) and len(request) == 2 else (request, {})
    if is_integer(options):
        options = {"max_new_tokens": options}
    is_named = isinstance(options, dict) and all(isinstance(name, str) and name != "input_ids" for name in options)
    if not isinstance(prompt, torch.Tensor) or not is_named:
        raise ValueError(
            "Each of `requests` must be a tensor of token ids, or a tuple of such a tensor and an integer "
            f"(`max_new_tokens`) or a dict of options, got {request!r:.80}. Convert it."
        )
    return prompt, options
