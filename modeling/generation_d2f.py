"""What transformers' `generate()` asks of a block-diffusion model. `decoding_modes.py` says which loop answers it."""

# B batch, P prompt tokens, T response tokens

import copy
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers.generation import (
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .block_grid import num_further_tokens
from .decoding_loop import DecodingLoop, run_to_the_end
from .decoding_modes import decoding_loop
from .generate_arguments import (
    as_plain_config,
    check_decoding,
    check_generation_config,
    check_guests,
    check_limits,
    check_model_kwargs,
    check_prompts,
    input_device,
    num_embeddings,
    refuse_adapters_of_rows,
    refuse_unread_inputs,
    remove_adapter_hooks,
)
from .generation_config_d2f import (
    OPTIONS,
    D2FGenerationConfig,
    check_values,
    parameters_not_used_by,
    parameters_of_other_rules,
)
from .generation_options import is_integer
from .generation_output import D2FGenerationOutput
from .gradient_mode import gradient_mode
from .logits_process_d2f import refuse_undeclared
from .response import Response
from .sampler import Sampler
from .stream_decoding import StreamDecoder, StreamSampler, stream_responses
from .stream_requests import RequestPreparer, check_stream_config, check_stream_options
from .verified_decoding import VerifiedDecoder

logger = logging.get_logger(__name__)

DEFAULT_MAX_NEW_TOKENS = 256


class D2FGenerationMixin(GenerationMixin):
    """`generate()` for block-diffusion models. Everything around the loop is transformers' own.

    The model's `forward` takes `input_ids`, a finished `attention_mask`, `position_ids`, `cache` and a bool
    `logits_to_keep`; its config has `block_size`, `mask_token_id` and `right_shift_logits`.
    """

    generation_config_class: type[D2FGenerationConfig]  # the model class sets it
    sampler_class: type[Sampler] = Sampler
    _supported_generation_modes = [GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE]

    def adjust_generation_fn(self, generation_config, *args, **kwargs):
        # The base class loads generation_config.json as a plain GenerationConfig.
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if getattr(self.generation_config, "_from_model_config", False):
            # There is no generation_config.json, and the base class has taken what it knows from config.json.
            self.generation_config = self.generation_config_class.from_model_config(self.config)
        elif not isinstance(self.generation_config, self.generation_config_class):
            self.generation_config = self.generation_config_class.from_file_of_any_version(self.generation_config)

    def generate(self, inputs=None, generation_config=None, *args, **kwargs):
        """transformers' `generate`, for prompts `(B, P)` of any integer type on any device.

        The options are those of `generation_config_class`, each of which can be given as a keyword. What cannot be
        decoded is refused before the first forward.

        Returns:
            `torch.LongTensor` of shape `(B, P + T)`, or with `return_dict_in_generate=True` [`D2FGenerationOutput`].

        Raises:
            ValueError: for prompts, options or adapters that are not supported.
        """
        if isinstance(kwargs.get("custom_generate"), str):  # somebody else's decoding
            return super().generate(inputs, generation_config, *args, **kwargs)
        try:
            check_generation_config("model.generation_config", self.generation_config)
            if generation_config is not None:
                check_generation_config("generation_config", generation_config)
            check_guests(kwargs)
            if inputs is not None and kwargs.get("input_ids") is not None:
                raise ValueError("`inputs` and `input_ids` are two names of one argument, got both. Leave one out.")
            if kwargs.get("inputs_embeds") is not None:
                raise ValueError("`inputs_embeds` is not supported: prompts are read as ids. Pass `input_ids`.")
            refuse_unread_inputs(self)
            device, given = input_device(self), kwargs.pop("input_ids", None) if inputs is None else inputs
            if given is not None:
                attention_mask = kwargs.get("attention_mask")
                check_prompts(given, attention_mask, num_embeddings(self))
                inputs = given.to(device=device, dtype=torch.long)
                if attention_mask is not None:
                    kwargs["attention_mask"] = attention_mask.to(device=device, dtype=torch.long)
            output = super().generate(inputs, generation_config, *args, **kwargs)
        except BaseException:
            remove_adapter_hooks(self)
            raise
        if given is not None and given.device != device:  # the caller gets tokens where the prompts are
            if isinstance(output, torch.Tensor):
                return output.to(given.device)
            if isinstance(output, D2FGenerationOutput):
                output.sequences = output.sequences.to(given.device)
        return output

    def _prepare_generation_config(self, generation_config, *args, **kwargs):
        own, given = self.generation_config, kwargs
        if generation_config is not None:
            generation_config = as_plain_config(generation_config, own, self.generation_config_class)
            values = {name: value for name, value in vars(generation_config).items() if value is not None}
            given = {**values, **{name: value for name, value in kwargs.items() if value is not None}}
        check_values(given)
        decoding = given.get("decoding") or getattr(own, "decoding", None) or "d2f"
        rule = given.get("acceptance_rule") or getattr(own, "acceptance_rule", None)
        # What the model's own generation config says for another mode is no argument of this call.
        ignored = {*parameters_not_used_by(decoding), *parameters_of_other_rules(rule)}
        of_this_mode = (getattr(own, "decoding", None) or "d2f") == decoding
        if decoding == "fast_dllm" and (kwargs.get("confidence_threshold") is not None or not of_this_mode):
            ignored.add("steps")
        check_values({name: value for name, value in vars(own).items() if name not in ignored})
        no_length = not any(
            value is not None for c in (given, vars(own)) for value in (c.get("max_length"), c.get("max_new_tokens"))
        )
        # The base class fills in what the model's own config says. It knows plain configs, whose options may be
        # those of another decoding until the last word is said.
        plain, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)
        config = self.generation_config_class()
        vars(config).update({name: value for name, value in vars(plain).items() if name != "_from_model_config"})
        for name in OPTIONS.keys() & model_kwargs.keys():
            setattr(config, name, model_kwargs.pop(name))
        for name in ignored:
            if given.get(name) is None:
                setattr(config, name, None)
        config.with_defaults().refuse_keywords(kwargs)
        if config.block_size is None:
            config.block_size = self.config.block_size
        config.check_block_size()
        check_decoding(self, config, model_kwargs.get("verifier"))
        if no_length:
            config.max_new_tokens = DEFAULT_MAX_NEW_TOKENS
        return config, model_kwargs

    def _extract_generation_mode_kwargs(self, custom_generate, kwargs, *args, **others):
        own = {"generator": kwargs.pop("generator", None)}
        if custom_generate is _arguments:  # of other functions the base class keeps no tokenizer for stop strings
            own["tokenizer"] = kwargs.get("tokenizer")
        mode_kwargs = super()._extract_generation_mode_kwargs(custom_generate, kwargs, *args, **others)
        return {**mode_kwargs, **{name: value for name, value in own.items() if value is not None}}

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        # The base class takes every padding token for padding. Those inside a text are text.
        is_token = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        return (is_token.cummax(-1).values & is_token.flip(-1).cummax(-1).values.flip(-1)).to(is_token.dtype)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if model_kwargs.get("cache") is not None or model_kwargs.get("past_key_values") is not None:
            raise ValueError(
                "`cache` cannot be passed to `generate`: keys and values of the prompt depend on all of it, so a "
                "cache does not carry over to another prompt. Leave it out; D2F makes its own."
            )

    def _get_logits_processor(self, generation_config, *args, **kwargs):
        for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
            if kwargs.get(name) is not None:
                raise ValueError(f"`{name}` is not available: guidance is against the masked prompt. Leave it out.")
        if generation_config.guidance_scale is not None:  # the vanilla loop does that itself
            generation_config = copy.copy(generation_config)
            generation_config.guidance_scale = None
        # Processors never see the padding of a row, so they need no mask to leave it out.
        kwargs["model_kwargs"] = None
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        # The smallest length goes by a token's position in the response, not by how much is decoded by now. The
        # sampler heeds it: see `Sampler.choose`. The caller's own processors stay.
        own = {id(processor) for processor in kwargs.get("logits_processor") or ()}
        by_length = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)
        processors = LogitsProcessorList(p for p in processors if id(p) in own or not isinstance(p, by_length))
        for i, processor in enumerate(processors):
            if isinstance(processor, PrefixConstrainedLogitsProcessor) and id(processor) not in own:
                # The constraint is per prompt, and each prompt has that many rows. transformers 5.17 does not say so.
                num_rows = generation_config.num_return_sequences or 1
                processors[i] = PrefixConstrainedLogitsProcessor(processor._prefix_allowed_tokens_fn, num_rows)
        return processors

    def _get_stopping_criteria(self, generation_config, stopping_criteria, *args, **kwargs):
        criteria = super()._get_stopping_criteria(generation_config, stopping_criteria, *args, **kwargs)
        # The loop itself ends rows at their limit and their EOS. The caller's own criteria stay.
        own = {id(criterion) for criterion in stopping_criteria or ()}
        by_end = (MaxLengthCriteria, EosTokenCriteria)
        return StoppingCriteriaList(c for c in criteria if id(c) in own or not isinstance(c, by_end))

    def _validate_generation_mode(self, generation_mode, *args, **kwargs):
        if generation_mode not in self._supported_generation_modes:
            raise ValueError(
                f"`generate` decodes by {generation_mode.value} with these arguments, which no `decoding` does. "
                "Leave out `num_beams`, `assistant_model` and the like; `do_sample` and `num_return_sequences` work."
            )
        super()._validate_generation_mode(generation_mode, *args, **kwargs)

    def _validate_model_kwargs(self, model_kwargs):
        check_model_kwargs(model_kwargs)
        super()._validate_model_kwargs({name: v for name, v in model_kwargs.items() if name != "verifier"})

    def init_continuous_batching(self, *args, **kwargs):
        raise ValueError(
            "Continuous batching decodes one token after the other and cannot run a block-diffusion model. "
            "`generate` takes batches of prompts of different lengths."
        )

    def open_stream(self, max_batch_size: int, max_prompt_length: int, **options) -> StreamDecoder:
        """A [`StreamDecoder`], which answers requests as they come, by pipelined decoding in one batch.

        Args:
            max_batch_size (`int`): Rows that are decoded at the same time at most.
            max_prompt_length (`int`): Tokens of the longest prompt that may come.
            options: As for `generate`. They hold for each request that does not say otherwise. No request can have
                more response tokens than they say.

        Raises:
            ValueError: for options that are not supported in a stream.
        """
        for name, value in (("max_batch_size", max_batch_size), ("max_prompt_length", max_prompt_length)):
            if not is_integer(value) or value < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}. Give the largest needed.")
        check_stream_options(options)
        arguments = self._generate_arguments(torch.zeros((1, 1), dtype=torch.long, device="cpu"), options)
        config: D2FGenerationConfig = arguments["generation_config"]
        check_stream_config(config)
        max_new_tokens = config.max_length - 1
        check_limits(self, config, max_prompt_length, 1)
        refuse_adapters_of_rows(self, config.decoding, max_batch_size)
        use_cache = arguments.get("use_cache") is not False
        for processor in arguments["logits_processor"]:
            refuse_undeclared(processor)

        def make_decoder(sampler: StreamSampler) -> DecodingLoop:
            prompts = torch.zeros((max_batch_size, max_prompt_length), dtype=torch.long, device=input_device(self))
            no_prompts = prompts.new_ones(max_batch_size)
            response = self._response(prompts, no_prompts, StoppingCriteriaList(), None, config, None, max_new_tokens)
            return decoding_loop(self, response, sampler, config, use_cache, arguments.get("verifier"))

        prepare = RequestPreparer(self, self._generate_arguments, options, config, max_prompt_length, max_new_tokens)
        # Guests of requests get copies.
        return StreamDecoder(prepare, make_decoder, gradient_mode(self, (), arguments.get("generator")))

    def _generate_arguments(self, input_ids: torch.LongTensor, options: dict[str, Any]) -> dict[str, Any]:
        """What transformers prepares for prompts `(B, P)`: what `_sample` would get."""
        return self.generate(
            input_ids, custom_generate=_arguments, attention_mask=torch.ones_like(input_ids), **options
        )

    def generate_stream_batch(
        self,
        requests: Iterable[torch.LongTensor | tuple[torch.LongTensor, int | dict[str, Any]] | None],
        max_batch_size: int,
        max_prompt_length: int,
        **kwargs,
    ) -> Iterator[tuple[int, torch.LongTensor]]:
        """Answers prompts as they come, by pipelined decoding: a finished one makes room for the next.

        Each response is that of `generate` with this prompt alone, up to rounding. It is a loop on `open_stream`.

        Args:
            requests (`Iterable`): Prompts of shape `(L,)`, each alone, or in a tuple with its own `max_new_tokens` or
                with a dict of options; see [`StreamDecoder.add`]. `None` says that nobody is waiting right now. The
                next request is asked for when there is room, between two steps, and where nothing is being decoded,
                again and again: it may take its time there.
            max_batch_size (`int`): Rows that are decoded at the same time at most.
            max_prompt_length (`int`): Tokens of the longest prompt that may come.
            kwargs: As for `generate`, which returns nothing but tokens here.

        Returns:
            `Iterator[tuple[int, torch.LongTensor]]`: The number of a request, from 0, and its response `(T,)` up to
            and including its EOS, in the order in which they are finished.

        Raises:
            ValueError: for options that are not supported in a stream; and from the iterator, once all others have
                their response, for a request that is not. What `requests` itself raises comes at that time, too.
        """
        if kwargs.get("prefix_allowed_tokens_fn") is not None or kwargs.get("forced_eos_token_id") is not None:
            raise ValueError(
                "`prefix_allowed_tokens_fn` and `forced_eos_token_id` depend on the number or the limit of a prompt, "
                "and are not supported for all requests. Give them to each request, in its dict of options."
            )
        if kwargs.get("min_length") and not kwargs.get("min_new_tokens"):
            raise ValueError(
                f"`min_length` (got {kwargs['min_length']}) counts the prompt, and prompts differ. Use "
                "`min_new_tokens`, or give it to each request, in its dict of options."
            )
        return stream_responses(self.open_stream(max_batch_size, max_prompt_length, **kwargs), requests)

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: D2FGenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        attention_mask: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool | None = None,
        verifier: Any = None,
        **model_kwargs,
    ) -> torch.LongTensor | D2FGenerationOutput:
        """What `generate` calls for greedy search and sampling once its inputs are prepared."""
        if verifier is not None and synced_gpus:
            raise ValueError(
                "`verifier` is not supported with `synced_gpus`: a process that has finished could not tell which of "
                "the two models the others are in. Leave one of them out."
            )
        refuse_adapters_of_rows(self, generation_config.decoding, len(input_ids))
        is_token = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        prompt_lengths = is_token.sum(-1)
        check_limits(self, generation_config, int(prompt_lengths.max()), input_ids.shape[1])
        if len(input_ids) > 1 and generation_config._pad_token_tensor is None and len(stopping_criteria) > 0:
            raise ValueError(
                "`pad_token_id` must be set for a batch with stopping criteria, which may end its rows at different "
                "lengths, got None. Set it in the call or in the generation config."
            )
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(
                f"`streamer` takes one sequence, but the batch has {len(input_ids)}. Generate one at a time."
            )
        if not generation_config.return_dict_in_generate:
            for name in ("output_trace", "output_scores", "output_logits"):
                if getattr(generation_config, name):
                    logger.warning_once(f"`{name}` has no effect without `return_dict_in_generate=True`.")
        # Rows are stored compactly: the prompt from position 0 without padding, the response right after it.
        order = (~is_token).long().argsort(dim=1, stable=True)
        prompts = input_ids.where(is_token, self.config.mask_token_id).gather(1, order)  # padding may be of any ids
        response = self._response(prompts, prompt_lengths, stopping_criteria, streamer, generation_config, input_ids)
        sampler = self.sampler_class(generation_config, logits_processor, generator)
        decoder = decoding_loop(self, response, sampler, generation_config, use_cache is not False, verifier)
        somebody_goes_on = functools.partial(
            self._has_unfinished_sequences, synced_gpus=synced_gpus, device=response.device
        )
        guests = [*logits_processor, *stopping_criteria, streamer]
        # With sharded weights others have hooks on the model.
        with torch.no_grad() if synced_gpus else gradient_mode(self, guests, generator)():
            run_to_the_end(decoder, self, response.device, somebody_goes_on)
        if streamer is not None:
            streamer.end()
        output = response.output(input_ids, decoder.num_forward_passes, decoder.trace, generation_config)
        if isinstance(decoder, VerifiedDecoder) and isinstance(output, D2FGenerationOutput):
            output.positions_per_forward = (decoder.num_positions / decoder.num_forward_passes).to(response.device)
            output.accepted_lengths = decoder.accepted_lengths
        return output

    def _response(
        self,
        prompts: torch.LongTensor,
        prompt_lengths: torch.LongTensor,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        generation_config: D2FGenerationConfig,
        input_ids: torch.LongTensor | None = None,
        max_new_tokens: int | None = None,
    ) -> Response:
        """The state of decoding for `prompts` `(B, P)`, of which row b has `prompt_lengths[b]` tokens.

        `input_ids` `(B, P)` are the same prompts with their padding.
        """
        if max_new_tokens is None:
            max_new_tokens = generation_config.max_length - prompts.shape[1]
        pad_token_id = generation_config._pad_token_tensor
        return Response(
            prompts=prompts,
            prompt_lengths=prompt_lengths,
            input_ids=input_ids,
            max_new_tokens=max_new_tokens,
            min_new_tokens=(generation_config.min_length or 0) - prompts.shape[1],
            mask_token_id=self.config.mask_token_id,
            eos_token_ids=generation_config._eos_token_tensor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            pad_token_id=None if pad_token_id is None else int(pad_token_id),
            num_further_tokens=num_further_tokens(generation_config.block_size, self.config.block_alignment),
            keep=tuple(name for name in ("scores", "logits") if getattr(generation_config, f"output_{name}")),
        )


def _arguments(model: Any, input_ids: torch.LongTensor, **arguments) -> dict[str, Any]:
    """As `custom_generate`: what `generate` has prepared, instead of decoding."""
    return {"input_ids": input_ids, **arguments}
