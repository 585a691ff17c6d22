"""What transformers' `generate()` asks of a block-diffusion model, and which decoding loop answers it."""

# B batch, P prompt tokens, T response tokens

import copy
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from transformers.generation import (
    EosTokenCriteria,
    ForcedEOSTokenLogitsProcessor,
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

from .decoding_loop import DecodingLoop, run_to_the_end
from .fast_dllm_decoding import FastDLLMDecoder
from .generation_config_d2f import (
    WITHOUT_MEANING_IN,
    D2FGenerationConfig,
    D2FGenerationOutput,
    parameters_of_other_rules,
)
from .lookahead_decoding import LookAheadDecoder
from .pipelined_decoding import PipelinedDecoder
from .response import Response
from .sampler import Sampler
from .stream_decoding import decode_stream
from .vanilla_decoding import VanillaDecoder

logger = logging.get_logger(__name__)

DEFAULT_MAX_NEW_TOKENS = 256
D2F_ONLY = ("block_add_threshold", "block_activation_threshold", "max_active_blocks")


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
        if generation_config is not None:
            generation_config = self.generation_config_class.from_dict(generation_config.to_dict())
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if getattr(self.generation_config, "_from_model_config", False):
            # There is no generation_config.json, and the base class has taken what it knows from config.json.
            self.generation_config = self.generation_config_class.from_model_config(self.config)
        elif not isinstance(self.generation_config, self.generation_config_class):
            config = self.generation_config_class.from_dict(self.generation_config.to_dict()).with_defaults()
            config._original_object_hash = hash(config)
            self.generation_config = config

    def _prepare_generation_config(self, generation_config, *args, **kwargs):
        given = (generation_config, self.generation_config)
        no_length = all(c is None or (c.max_length is None and c.max_new_tokens is None) for c in given)
        no_length = no_length and kwargs.get("max_length") is None and kwargs.get("max_new_tokens") is None
        if generation_config is not None:
            known = vars(self.generation_config_class())
            for name, value in vars(generation_config).items():
                if name not in known and not name.startswith("_") and value is not None:
                    raise ValueError(
                        f"`generation_config` must hold parameters of generation only, but it has `{name}`, which is "
                        "none. Check the spelling, or leave it out."
                    )
        config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)
        # What the model's own generation config says for another mode is no argument of this call.
        ignored = list(WITHOUT_MEANING_IN.get(config.decoding or "d2f", ()))
        ignored += parameters_of_other_rules(config.acceptance_rule)
        threshold = kwargs.get("confidence_threshold")
        of_this_mode = self.generation_config.decoding == config.decoding
        if config.decoding == "fast_dllm" and (threshold is not None or not of_this_mode):
            ignored.append("steps")
        for name in ignored:
            if kwargs.get(name) is None and getattr(generation_config, name, None) is None:
                setattr(config, name, None)
        if not isinstance(config, self.generation_config_class):
            values = {name: value for name, value in vars(config).items() if name != "_from_model_config"}
            config = self.generation_config_class()
            vars(config).update(values)
        config.with_defaults()
        if config.block_size is None:
            config.block_size = self.config.block_size
        # As keywords only: in a config they may be the values of D2F, which it has by default.
        refused = () if config.decoding == "d2f" else D2F_ONLY
        if config.decoding == "vanilla":
            refused += ("confidence_threshold",)
        for name in refused:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"`{name}` (got {kwargs[name]!r}) has no meaning with decoding={config.decoding!r}. Leave it out, "
                    "or take decoding='d2f'."
                )
        if threshold is not None and config.acceptance_rule in ("entropy_bound", "factor"):
            raise ValueError(
                f"`confidence_threshold` (got {threshold!r}) has no meaning with acceptance_rule="
                f"{config.acceptance_rule!r}, which has a parameter of its own. Leave one of them out."
            )
        if config.decoding == "fast_dllm" and config.steps is not None and threshold is not None:
            raise ValueError(
                f"`confidence_threshold` (got {threshold!r}) has no meaning with `steps` (got {config.steps}), which "
                "fix how many tokens each step accepts. Leave one of them out."
            )
        if no_length:
            config.max_new_tokens = DEFAULT_MAX_NEW_TOKENS
        return config, model_kwargs

    def _extract_generation_mode_kwargs(self, custom_generate, kwargs, *args, **others):
        generator = kwargs.pop("generator", None)
        mode_kwargs = super()._extract_generation_mode_kwargs(custom_generate, kwargs, *args, **others)
        return mode_kwargs if generator is None else {**mode_kwargs, "generator": generator}

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
                raise ValueError(f"`{name}` is not available: guidance is against the prompt masked. Leave it out.")
        if generation_config.guidance_scale is not None:  # the vanilla loop does that itself
            generation_config = copy.copy(generation_config)
            generation_config.guidance_scale = None
        # Processors never see the padding of a row, so they need no mask to leave it out.
        kwargs["model_kwargs"] = None
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        # The smallest length is a matter of a token's place in the response, not of how much is decoded by now: see
        # `_predict`. The caller's own processors stay.
        own = {id(processor) for processor in kwargs.get("logits_processor") or ()}
        by_length = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)
        processors = LogitsProcessorList(p for p in processors if id(p) in own or not isinstance(p, by_length))
        for i, processor in enumerate(processors):
            if isinstance(processor, PrefixConstrainedLogitsProcessor) and id(processor) not in own:
                # It speaks of prompts, of which each has that many rows. transformers 5.17 does not say so.
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
                f"`generate` decodes by {generation_mode.value} with these arguments, which block diffusion cannot. "
                "Leave out `num_beams`, `assistant_model` and the like; `do_sample` and `num_return_sequences` work."
            )
        super()._validate_generation_mode(generation_mode, *args, **kwargs)

    def _validate_model_kwargs(self, model_kwargs):
        for name in ("position_ids", "prompt_lengths", "labels", "logits_to_keep"):
            if model_kwargs.get(name) is not None:
                raise ValueError(
                    f"`{name}` is decided by `generate` and cannot be passed to it. Leave it out; `attention_mask` "
                    "says what is padding."
                )
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                "`attention_mask` must have the shape (B, P) of the prompts, but it has "
                f"{tuple(attention_mask.shape)}."
            )
        super()._validate_model_kwargs(model_kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        raise ValueError(
            "Continuous batching decodes one token after the other and cannot run a block-diffusion model. "
            "`generate` takes batches of prompts of different lengths."
        )

    def generate_stream_batch(
        self,
        requests: Iterable[torch.LongTensor | tuple[torch.LongTensor, int] | None],
        max_batch_size: int,
        max_prompt_length: int,
        **kwargs,
    ) -> Iterator[tuple[int, torch.LongTensor]]:
        """Answers prompts as they come, by pipelined decoding: a row that is finished makes room for the next one.

        Each response is that of `generate` with this prompt alone, up to rounding.

        Args:
            requests (`Iterable`): Prompts of shape `(L,)`, each alone or with a `max_new_tokens` of its own; `None`
                says that nobody is waiting right now. The next one is asked for when there is room, between two
                steps, and where nothing is being decoded, again and again: it may take its time there.
            max_batch_size (`int`): Rows that are decoded at the same time at the most.
            max_prompt_length (`int`): The longest prompt that may come.
            kwargs: As for `generate`, which returns nothing but tokens here.

        Returns:
            `Iterator[tuple[int, torch.LongTensor]]`: The number of a request, from 0, and its response `(T,)` up to
            and including its EOS, in the order in which they are finished.

        Raises:
            ValueError: for arguments without meaning here; and from the iterator, once all requests before it have
                their response, for a prompt that is empty or too long, or too large a `max_new_tokens`. What
                `requests` itself raises comes at that time, too.
        """
        for name, value in (("max_batch_size", max_batch_size), ("max_prompt_length", max_prompt_length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}. Give the largest needed.")
        if kwargs.get("synced_gpus"):
            raise ValueError(
                "`synced_gpus` must be False: processes that answer different requests cannot keep each other's "
                "company. Use `generate`."
            )
        if kwargs.get("streamer") is not None:
            raise ValueError("`streamer` takes one sequence, but here rows come and go. Use `generate` for it.")
        if kwargs.get("attention_mask") is not None:
            raise ValueError("`attention_mask` has no meaning where prompts come without padding. Leave it out.")

        def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **mode_kwargs):
            if generation_config.decoding != "d2f":
                raise ValueError(
                    f"`decoding` must be 'd2f' where rows come and go, got {generation_config.decoding!r}. Leave it "
                    "out."
                )
            for name in ("output_scores", "output_logits", "output_trace", "return_dict_in_generate"):
                if getattr(generation_config, name):
                    raise ValueError(f"`{name}` is not available where rows come and go. Use `generate` for it.")
            self._check_limits(generation_config, max_prompt_length, max_prompt_length)
            for processor in logits_processor:
                if isinstance(processor, (PrefixConstrainedLogitsProcessor, ForcedEOSTokenLogitsProcessor)):
                    raise ValueError(
                        "`prefix_allowed_tokens_fn` and `forced_eos_token_id` depend on the number or the limit of a "
                        "prompt, and are not available where rows come and go. Use `generate` for them."
                    )
            if generation_config.min_length and not generation_config.min_new_tokens:
                raise ValueError(
                    f"`min_length` (got {generation_config.min_length}) counts the prompt, and prompts differ. Use "
                    "`min_new_tokens`."
                )
            use_cache = mode_kwargs.get("use_cache") is not False
            without_gradients = self._without_gradients(False, [*logits_processor, *stopping_criteria])

            def decoder() -> DecodingLoop:
                prompts = input_ids.expand(max_batch_size, -1)
                prompt_lengths = prompts.new_ones(len(prompts))
                response = self._response(prompts, prompt_lengths, stopping_criteria, None, generation_config)
                sampler = self.sampler_class(generation_config, logits_processor, mode_kwargs.get("generator"))
                return self._decoder(response, sampler, generation_config, use_cache)

            return decode_stream(decoder, requests, self.config.vocab_size, without_gradients)

        if (kwargs.get("num_return_sequences") or 1) > 1:
            raise ValueError(
                f"`num_return_sequences` (got {kwargs['num_return_sequences']}) is not available where rows come and "
                "go. Give a prompt several times: those next to each other share their first forward."
            )
        # transformers prepares what it prepares for any prompt.
        prompt = torch.zeros((1, max_prompt_length), dtype=torch.long, device=self.device)
        return self.generate(prompt, custom_generate=decode, attention_mask=torch.ones_like(prompt), **kwargs)

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
        **model_kwargs,
    ) -> torch.LongTensor | D2FGenerationOutput:
        """What `generate` calls for greedy search and sampling once its inputs are prepared."""
        if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "`input_ids` must hold at least one prompt token, got none (`inputs_embeds` cannot take their place). "
                "Start an empty prompt with the BOS token."
            )
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"`attention_mask` must have the shape of `input_ids`, {tuple(input_ids.shape)}, but it has "
                f"{tuple(attention_mask.shape)}. It says which of the prompt's tokens are padding."
            )
        input_ids = input_ids.long()
        is_token = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        prompt_lengths = is_token.sum(-1)
        if (prompt_lengths == 0).any():
            raise ValueError(
                "`attention_mask` must leave at least one prompt token in each row, but a row has none. "
                "Start an empty prompt with the BOS token."
            )
        self._check_limits(generation_config, int(prompt_lengths.max()), input_ids.shape[1])
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
        response = self._response(
            input_ids.gather(1, order), prompt_lengths, stopping_criteria, streamer, generation_config
        )
        sampler = self.sampler_class(generation_config, logits_processor, generator)
        decoder = self._decoder(response, sampler, generation_config, use_cache is not False)
        somebody_goes_on = functools.partial(
            self._has_unfinished_sequences, synced_gpus=synced_gpus, device=response.device
        )
        with self._without_gradients(synced_gpus, [*logits_processor, *stopping_criteria, streamer])():
            run_to_the_end(decoder, self, response.device, somebody_goes_on)
        if streamer is not None:
            streamer.end()
        return response.output(input_ids, decoder.num_forward_passes, decoder.trace, generation_config)

    def _without_gradients(self, synced_gpus: bool, guests: list[object]) -> Callable:
        """`torch.inference_mode`, in which a small model decodes a tenth faster than in `torch.no_grad`. The latter
        where tensors made in that mode could outlive decoding: where somebody else's code gets them (`guests`, hooks,
        which FSDP and DeepSpeed have too), or the model keeps some (rotary frequencies that follow the length)."""
        is_own = all(guest is None or type(guest).__module__.startswith("transformers.") for guest in guests)
        keeps_none = self.config.rope_parameters["rope_type"] not in ("dynamic", "longrope")
        has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in self.modules())
        if synced_gpus or has_hooks or not is_own or not keeps_none:
            return torch.no_grad
        return torch.inference_mode

    def _check_limits(self, generation_config: D2FGenerationConfig, longest_prompt: int, prompt_width: int) -> None:
        """Refuses special tokens and lengths that the model cannot have. `prompt_width` is with padding."""
        if self.config.mask_token_id is None:
            raise ValueError("`config.mask_token_id` must be set to decode by diffusion, but it is None.")
        eos_token_ids = generation_config._eos_token_tensor
        if eos_token_ids is not None:
            for token_id in eos_token_ids.tolist():
                if token_id == self.config.mask_token_id or not 0 <= token_id < self.config.vocab_size:
                    raise ValueError(
                        f"`eos_token_id` must be an id of the vocabulary (0 .. {self.config.vocab_size - 1}) other "
                        f"than the mask token's ({self.config.mask_token_id}), got {token_id}."
                    )
        positions = self.config.max_position_embeddings
        if longest_prompt >= positions:
            raise ValueError(
                f"`input_ids` must leave room for a response in the model's {positions} positions, but a prompt has "
                f"{longest_prompt} tokens. Shorten it."
            )
        longest = longest_prompt + generation_config.max_length - prompt_width
        if longest > positions:
            logger.warning_once(
                f"Prompt and response may reach {longest} tokens, more than the {positions} positions that the model "
                "was made for. Set a smaller `max_new_tokens`."
            )

    def _response(
        self,
        prompts: torch.LongTensor,
        prompt_lengths: torch.LongTensor,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        generation_config: D2FGenerationConfig,
    ) -> Response:
        """The state of decoding for `prompts` `(B, P)`, of which row b has `prompt_lengths[b]` tokens."""
        return Response(
            prompts=prompts,
            prompt_lengths=prompt_lengths,
            max_new_tokens=generation_config.max_length - prompts.shape[1],
            min_new_tokens=(generation_config.min_length or 0) - prompts.shape[1],
            mask_token_id=self.config.mask_token_id,
            eos_token_ids=generation_config._eos_token_tensor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            keep=tuple(name for name in ("scores", "logits") if getattr(generation_config, f"output_{name}")),
        )

    def _decoder(
        self, response: Response, sampler: Sampler, generation_config: D2FGenerationConfig, use_cache: bool
    ) -> DecodingLoop:
        """The loop that `decoding` names."""
        arguments = (self, response, sampler, generation_config)
        if generation_config.decoding == "vanilla":
            _refuse_left_to_right(sampler, "decoding='vanilla'", "take decoding='d2f'")
            return VanillaDecoder(*arguments)
        if generation_config.decoding == "fast_dllm":
            _refuse_left_to_right(sampler, "decoding='fast_dllm'", "take decoding='d2f'")
            return FastDLLMDecoder(*arguments, use_cache=use_cache)
        if generation_config.compile_config is not None and not use_cache:
            raise ValueError(
                "`compile_config` is not supported with use_cache=False, where each forward has another length. Leave "
                "one of them out."
            )
        if (generation_config.num_branches or 1) > 1:
            _refuse_left_to_right(sampler, "`num_branches`", "leave out `num_branches`")
            return LookAheadDecoder(*arguments, use_cache=use_cache)
        if generation_config.remask_threshold:
            _refuse_left_to_right(sampler, "`remask_threshold`", "leave out `remask_threshold`")
        return PipelinedDecoder(*arguments, use_cache=use_cache)


def _refuse_left_to_right(sampler: Sampler, option: str, instead: str) -> None:
    if sampler.left_to_right:
        raise ValueError(
            "`prefix_allowed_tokens_fn`, `no_repeat_ngram_size` and `bad_words_ids` or `sequence_bias` of several "
            f"tokens need the tokens right before the chosen one, which {option} may decode later. Leave them out, or "
            f"{instead}."
        )
