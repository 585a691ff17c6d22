"""What the block-diffusion architectures share: the norm, both forwards, saving. Attention is in `attention_d2f.py`.

An architecture brings its configuration, its layers and the names of its parameters: `modeling_d2f_llada.py`,
`modeling_d2f_dream.py`.
"""

# B batch, L sequence, S key/value slots, V vocabulary, M positions whose logits are wanted

import copy
import json
import tempfile
import warnings
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, cached_file, logging
from transformers.utils.output_capturing import capture_outputs

from .attention_d2f import D2FRotaryEmbedding, attention_function_of, full_mask
from .block_causal import positions_without_padding
from .configuration_d2f import D2FConfig, published_class
from .draft_adapter import DraftAdapter
from .generation_config_d2f import D2FGenerationConfig
from .generation_d2f import D2FGenerationMixin

logger = logging.get_logger(__name__)


@dataclass
class D2FModelOutput(ModelOutput):
    """What `D2FModel.forward` returns.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(B, L, hidden_size)`): After the last norm.
        cache (`Cache`, *optional*): The cache that was passed, updated.
        hidden_states (`tuple[torch.FloatTensor]`, *optional*): Per layer, if `output_hidden_states`.
        attentions (`tuple[torch.FloatTensor]`, *optional*): Per layer, if `output_attentions` (eager attention only).
    """

    last_hidden_state: torch.FloatTensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class D2FBlockDiffusionOutput(ModelOutput):
    """What `D2FForBlockDiffusion.forward` returns.

    Args:
        loss (`torch.FloatTensor`, *optional*): Cross-entropy at the positions with a label.
        logits (`torch.FloatTensor` of shape `(B, L, V)`, or `(M, V)` for a mask as `logits_to_keep`): As they leave
            the head. With `config.right_shift_logits`, those at position i predict token i + 1.
        cache, hidden_states, attentions: As in [`D2FModelOutput`].
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


class D2FRMSNorm(nn.Module):
    """Root-mean-square norm with a weight, computed in float32."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        squares = (x * x).sum(-1, keepdim=True)
        # Their mean plus eps. An operand that is a number is made a tensor first, which on a CPU takes longer.
        mean = torch.full_like(squares, self.eps).add_(squares, alpha=1 / x.shape[-1])
        return self.weight * (x * mean.rsqrt_()).to(hidden_states.dtype)


class D2FPreTrainedModel(PreTrainedModel):
    """What transformers has to know about all block-diffusion models."""

    config: D2FConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = False  # it has no place for a block-causal mask
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq$"]  # of old checkpoints; they are computed here

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DraftAdapter):
            module.reset_parameters()

    @property
    def device(self) -> torch.device:
        """Where the model computes. It is "meta" only for a model without weights.

        Weights that accelerate has offloaded are on "meta" too until they are needed; its hooks know where they go.
        """
        device = super().device
        if device.type == "meta":
            for module in self.modules():
                hook = getattr(module, "_hf_hook", None)
                for part in getattr(hook, "hooks", (hook,)):
                    if getattr(part, "execution_device", None) is not None:
                        return torch.device(part.execution_device)
        return device

    def load_adapter(self, peft_model_id: str | None = None, *args, **kwargs):
        """As in transformers; takes the block size that the adapter was trained with, if its folder has it."""
        result = super().load_adapter(peft_model_id, *args, **kwargs)
        if peft_model_id is not None:
            hub = kwargs.get("adapter_kwargs") or {}
            file = cached_file(
                peft_model_id,
                "generation_config.json",
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
                **{name: hub[name] for name in ("revision", "subfolder", "token", "cache_dir") if name in hub},
            )
            block_size = None if file is None else json.loads(Path(file).read_text()).get("block_size")
            if block_size is not None:
                self.config.block_size = block_size
        return result

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        *args,
        **kwargs,
    ):
        """As in transformers. The folder names the nearest published class, and holds its code.

        Raises:
            ValueError: before anything is written, if that class would not take these weights or this configuration.
        """
        published = published_class(type(self))
        config = self.config.as_published()
        self._check_configs(config)
        is_sharded = any(hasattr(weight, "full_tensor") for weight in self.parameters())
        is_gathered_here = self._tp_size is not None or getattr(self.config, "distributed_config", None) is not None
        if is_sharded and state_dict is None and not is_gathered_here:
            raise ValueError(
                "`state_dict` must be given for a model whose weights are sharded, because each process has a part of "
                "them. Gather them in all processes: torch.distributed.checkpoint.state_dict.get_model_state_dict("
                "model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
            )
        saved = self
        if type(self) is not published:
            self._check_weights_of(published, config)
            # transformers takes names and code from the type. This one is what the folder will say, and does what the
            # model does.
            disguise = type(published.__name__, (type(self),), {"__module__": published.__module__})
            saved = object.__new__(disguise)
            object.__setattr__(saved, "__dict__", self.__dict__)
        # Written anew, so that a model that came from the Hub does not keep references to the repository that it came
        # from. Both auto classes give the model with `generate`.
        name = f"{published.__module__.rpartition('.')[2]}.{published.__name__}"
        auto_classes = ("AutoModel", "AutoModelForCausalLM") if self.can_generate() else ("AutoModel",)
        self.config.auto_map = {
            "AutoConfig": f"{type(config).__module__.rpartition('.')[2]}.{type(config).__name__}",
            **dict.fromkeys(auto_classes, name),
        }
        return super(D2FPreTrainedModel, saved).save_pretrained(
            save_directory, is_main_process, state_dict, *args, **kwargs
        )

    def _check_configs(self, config: D2FConfig) -> None:
        """Raises an error if the configurations cannot be saved, or not be loaded again."""
        generation_config = self.generation_config if self.can_generate() else None
        if self.can_generate() and generation_config is None:
            raise ValueError("`generation_config` must be set to save the model, but it is None. Set the default one.")
        try:
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                type(config).from_pretrained(folder)
                if generation_config is not None:
                    generation_config.save_pretrained(folder)
                    D2FGenerationConfig.from_pretrained(folder)
        except Exception as error:  # of several kinds, none of which says what it is about
            raise ValueError(f"The model's configuration cannot be saved so that it loads again: {error}") from error

    def _check_weights_of(self, published: type[PreTrainedModel], config: D2FConfig) -> None:
        """Raises an error if `published` has other weights than this model, which is derived from it."""
        if type(self).__name__ != f"FSDP{published.__name__}":
            logger.warning_once(f"A {type(self).__name__} is saved as {published.__name__}, without its own code.")
        if getattr(self, "hf_quantizer", None) is not None or getattr(self, "_hf_peft_config_loaded", False):
            return  # weights in another form, or those of the adapter only
        with torch.device("meta"):
            expected = {name: weight.shape for name, weight in published(copy.copy(config)).state_dict().items()}
        own = {name: weight.shape for name, weight in self.state_dict().items()}
        different = sorted(name for name in own | expected if own.get(name) != expected.get(name))
        if different:
            raise ValueError(
                f"A {type(self).__name__} is saved as {published.__name__}, whose code the folder gets, but its "
                f"weights are not those of that class: {', '.join(different[:5])}. Save its `state_dict()`, or "
                f"publish the class: its file next to that of {published.__name__}, and "
                f'`{type(self).__name__}.register_for_auto_class("AutoModelForCausalLM")`.'
            )


class D2FModel(D2FPreTrainedModel):
    """A transformer that gives hidden states, before the head. The architecture brings the layers."""

    rotary_emb: D2FRotaryEmbedding

    def get_layers(self) -> nn.ModuleList:
        """The layers, from first to last."""
        raise NotImplementedError

    def get_final_norm(self) -> nn.Module:
        """The norm behind the last layer."""
        raise NotImplementedError

    def draft_inputs(
        self, inputs_embeds: torch.Tensor, is_drafted: torch.BoolTensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the layers read, `(B, L, hidden_size)`, and the gate of a drafter `(B, L, 1)`, which most have not."""
        return inputs_embeds, None

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        prompt_lengths: torch.LongTensor | None = None,
        block_size: int | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> D2FModelOutput:
        """Hidden states of a sequence. For the arguments see [`D2FForBlockDiffusion.forward`]."""
        return_dict, cache = _pop_return_dict(self.config, kwargs), _pop_old_name_of_cache(cache, kwargs)
        arguments = (input_ids, attention_mask, position_ids, cache, inputs_embeds, prompt_lengths, block_size)
        options = ("output_hidden_states", "output_attentions")
        if any(kwargs.get(option, getattr(self.config, option)) for option in options):
            output = self._recorded_forward(*arguments, return_dict=True, **kwargs)
            return output if return_dict else output.to_tuple()
        hidden_states = self._forward(*arguments, **kwargs)
        if return_dict:
            return D2FModelOutput(last_hidden_state=hidden_states, cache=cache)
        return (hidden_states,) if cache is None else (hidden_states, cache)

    def _forward(
        self,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor | None,
        cache: Cache | None,
        inputs_embeds: torch.FloatTensor | None,
        prompt_lengths: torch.LongTensor | None,
        block_size: int | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.FloatTensor:
        """Gives the last hidden states, `(B, L, hidden_size)`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        inputs_embeds, draft_gate = self.draft_inputs(inputs_embeds, kwargs.pop("is_drafted", None))
        if position_ids is None:
            if attention_mask is not None and attention_mask.dim() == 2:
                position_ids = positions_without_padding(attention_mask)[:, -inputs_embeds.shape[1] :]
            else:
                start = cache.get_seq_length() if cache is not None else 0
                position_ids = (start + torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device))[None]
        attention_mask = full_mask(
            self.config, attention_mask, position_ids, inputs_embeds, cache, prompt_lengths, block_size
        )
        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        kwargs["attention_function"] = attention_function_of(self.config, has_options=bool(kwargs))  # for all layers
        if draft_gate is not None:
            kwargs["draft_gate"] = draft_gate
        for layer in self.get_layers():
            hidden_states = layer(hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        return self.get_final_norm()(hidden_states)

    @capture_outputs
    def _recorded_forward(self, *args, **kwargs) -> D2FModelOutput:
        """Gives hidden states or attentions of the layers too."""
        return D2FModelOutput(last_hidden_state=self._forward(*args, **kwargs), cache=args[3])


def _pop_return_dict(config: D2FConfig, kwargs: dict[str, Any]) -> bool:
    return_dict = kwargs.pop("return_dict", None)
    return config.return_dict is not False if return_dict is None else return_dict


def _pop_old_name_of_cache(cache: Cache | None, kwargs: dict[str, Any]) -> Cache | None:
    """The cache, which used to be passed as `past_key_values`."""
    if "past_key_values" not in kwargs:
        return cache
    if not torch.compiler.is_compiling():
        warnings.warn("`past_key_values` is a deprecated name. Use `cache` instead.", FutureWarning, stacklevel=3)
    old = kwargs.pop("past_key_values")
    return old if cache is None else cache


class D2FForBlockDiffusion(D2FPreTrainedModel, D2FGenerationMixin):
    """A transformer with its head and D2F decoding: `model.generate(**inputs)`."""

    generation_config_class = D2FGenerationConfig  # here, because the base class has the attribute too
    model: D2FModel

    def __init__(self, config: D2FConfig):
        super().__init__(config)
        # Labels stand at the masked positions; whether logits are one position ahead of them is the model's matter.
        self.loss_type = "ForCausalLM" if config.right_shift_logits else "ForMaskedLM"

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        prompt_lengths: torch.LongTensor | None = None,
        block_size: int | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor | tuple[torch.Tensor, torch.Tensor] = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> D2FBlockDiffusionOutput:
        """Logits of a sequence: bidirectional (the teacher's view), or block-causal if `prompt_lengths` are given.

        Args:
            input_ids (`torch.LongTensor` of shape `(B, L)`): Token ids, with `mask_token_id` where a token is masked.
            attention_mask (`torch.Tensor`, *optional*): `(B, L)`, 0 for padding (at either end; with a cache `(B,
                S)`), which nobody sees. Or a finished mask `(B, 1, L, S)`: bool (`True`: may attend) or float (added
                to the scores), which then decides alone who sees whom.
            position_ids (`torch.LongTensor` of shape `(B, L)`, *optional*): Positions; those without padding by
                default.
            cache (`Cache`, *optional*): Keys and values of earlier tokens; rows are stored without holes.
            inputs_embeds (`torch.FloatTensor` of shape `(B, L, hidden_size)`, *optional*): Instead of `input_ids`.
            prompt_lengths (`torch.LongTensor` of shape `(B,)`, *optional*): Prompt tokens of each row, padding left
                out. Makes the pass block-causal: the prompt is block 0, blocks of `block_size` tokens follow it. With
                `config.block_alignment="sequence"` it makes the pass block-causal too, but blocks are counted from the
                first token of the row, so the lengths themselves change nothing.
            block_size (`int`, *optional*): Tokens per response block; `config.block_size` by default.
            labels (`torch.LongTensor` of shape `(B, L)`, *optional*): The true tokens at the positions that the loss
                is about (the masked ones), -100 elsewhere.
            use_cache (`bool`, *optional*): Of no effect: a cache is used if it is passed.
            is_drafted (`torch.BoolTensor` of shape `(B, L)`, *optional*): The masks of a draft, which a model with
                `config.drafter` reads with its drafter. Others take no notice.
            logits_to_keep (`int`, `torch.Tensor` or a pair of them): The last so many positions (0: all), a vector of
                positions, a bool mask `(B, L)`, which gives logits `(M, V)` in row-major order, or rows and positions,
                `(M,)` each, which give `(M, V)` too and make no accelerator wait.

        Returns:
            [`D2FBlockDiffusionOutput`]
        """
        return_dict, cache = _pop_return_dict(self.config, kwargs), _pop_old_name_of_cache(cache, kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            prompt_lengths=prompt_lengths,
            block_size=block_size,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if isinstance(logits_to_keep, tuple) or (
            isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.dtype == torch.bool
        ):
            hidden_states = hidden_states[logits_to_keep]
        elif isinstance(logits_to_keep, torch.Tensor):
            hidden_states = hidden_states[:, logits_to_keep]
        elif logits_to_keep:
            hidden_states = hidden_states[:, -logits_to_keep:]
        head: Any = self.get_output_embeddings()
        logits = head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = D2FBlockDiffusionOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return output if return_dict else output.to_tuple()
