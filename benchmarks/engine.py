"""What the decoding loop costs apart from the model: overhead, masked share, context, early end, adapters.

None of this needs a trained model: `scripted.py` makes what the loop runs on. `record_forwards` keeps what the loop
gave to the model, so that the same forwards can be run again without the loop.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from benchmarks.probes import block_diffusion_model, replaced_method, without_adapter
from benchmarks.scripted import ScriptedAcceptance, scripted_run, timed_call
from d2f_hf.benchmarking import System, answer_in_batches, responses, wait_for

# B batch, L sequence, W window, V vocabulary, M masked tokens in the window, all rows


@dataclass(frozen=True)
class RecordedForward:
    """One forward as the decoding loop called it.

    Args:
        kwargs (`dict`): Its arguments, tensors copied; the cache is the loop's own.
        window (`tuple`, *optional*): Arguments of the `cache.set_window` before it; `None` without a cache.
    """

    kwargs: dict[str, Any]
    window: tuple | None

    @property
    def num_positions(self) -> int:
        """Positions that went through the model, padding included: B * W."""
        return self.kwargs["input_ids"].numel()

    @property
    def num_masked(self) -> int:
        """Masked positions of live rows among them, M: those whose logits the loop wants."""
        return num_logits(self.kwargs["logits_to_keep"])


@dataclass(frozen=True)
class LoopOverhead:
    """How much longer `generate` takes than its forwards alone.

    Args:
        ratio (`float`): Wall time of `generate` / wall time of its forwards run again; median over repetitions.
        generate_seconds, forward_seconds (`float`): Medians of the two.
        forwards (`list[RecordedForward]`): Those of one call.
        num_tokens (`int`): Response tokens of one call, all rows.
    """

    ratio: float
    generate_seconds: float
    forward_seconds: float
    forwards: list[RecordedForward]
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Response tokens of all rows / wall time of `generate`."""
        return self.num_tokens / self.generate_seconds


@dataclass(frozen=True)
class ContextGrowth:
    """How the time of a denoising step grows with the context, and how that of its forward alone does.

    Args:
        contexts (`tuple[int, int]`): The shorter and the longer prompt, in tokens.
        step_seconds (`tuple[float, float]`): Wall time of `generate` behind its first forward / steps, at each.
        forward_seconds (`tuple[float, float]`): The same of the forwards alone.
    """

    contexts: tuple[int, int]
    step_seconds: tuple[float, float]
    forward_seconds: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Growth of the step / growth of the forward: above 1 the loop's own work grows faster than the model's."""
        short, long = self.step_seconds
        bare_short, bare_long = self.forward_seconds
        return (long / short) / (bare_long / bare_short)


@dataclass(frozen=True)
class EarlyEnd:
    """What a high limit costs a response that ends early.

    Args:
        limits (`tuple[int, int]`): The two `max_new_tokens`.
        num_forwards (`tuple[int, int]`): Forwards with each.
        time_ratio (`float`): Wall time with the second / with the first limit; median over repetitions.
    """

    limits: tuple[int, int]
    num_forwards: tuple[int, int]
    time_ratio: float


def record_forwards(
    system: System, inputs: Mapping[str, torch.Tensor], script: ScriptedAcceptance | None = None
) -> list[RecordedForward]:
    """All forwards of one call of `generate` with prompts `(B, L)`.

    Raises:
        ValueError: for a model that is not a block-diffusion model, or compiled steps, which do not go through the
            model's `forward`.
    """
    if system.options.get("compile_config") is not None:
        raise ValueError(
            "`compile_config` cannot be among the options of a system whose forwards are run again, because compiled "
            "steps cannot. Leave it out, and compare with `gain`."
        )
    model = block_diffusion_model(system.model)
    recorded: list[RecordedForward] = []

    def recording(forward: Callable) -> Callable:
        def call(**kwargs):
            cache = kwargs.get("cache")
            recorded.append(RecordedForward(_copied(kwargs), None if cache is None else _copied(cache.window)))
            return forward(**kwargs)

        return call

    with replaced_method(model, "forward", recording):
        timed_call(system, inputs, script)
    return recorded


@torch.inference_mode()
def replay_forwards(model: Any, forwards: Sequence[RecordedForward]) -> None:
    """Runs forwards again, with the window of the cache that each of them had.

    Which keys and values the cache holds is another matter than at first, and does not change the time.
    """
    model = without_adapter(model)
    for forward in forwards:
        if forward.window is not None:
            forward.kwargs["cache"].set_window(*forward.window)
        model.forward(**forward.kwargs)


def loop_overhead(
    system: System,
    inputs: Mapping[str, torch.Tensor],
    script: ScriptedAcceptance | None = None,
    repetitions: int = 5,
) -> LoopOverhead:
    """Wall time of `generate` against that of its forwards alone; the two take turns, and at going first too.

    The forwards are those of a call before, which warms up: same inputs, same window of the cache, which is set in
    their time too. Time in the script is taken off.

    Args:
        system (`System`): A block-diffusion model and the keywords of `generate`; it must decode the same each time.
        inputs (`Mapping[str, torch.Tensor]`): Prompts `(B, L)`.
        script (`ScriptedAcceptance`, *optional*): Replaces the choice of tokens.
        repetitions (`int`): Pairs of times.

    Raises:
        ValueError: for a model that is not a block-diffusion model, or no repetitions.
    """
    _check_repetitions(repetitions)
    forwards = record_forwards(system, inputs, script)
    _replay_seconds(system.model, forwards)
    pairs = []
    for repetition in range(repetitions):
        first = _replay_seconds(system.model, forwards) if repetition % 2 else None
        output, seconds = timed_call(system, inputs, script)
        pairs.append((seconds, first or _replay_seconds(system.model, forwards)))
    return LoopOverhead(
        ratio=statistics.median(loop / bare for loop, bare in pairs),
        generate_seconds=statistics.median(loop for loop, _ in pairs),
        forward_seconds=statistics.median(bare for _, bare in pairs),
        forwards=forwards,
        num_tokens=sum(len(row) for row in responses(system, inputs, output)),
    )


def masked_share(forwards: Sequence[RecordedForward], without_prefill: bool = False) -> float:
    """Masked positions of live rows / all positions that went through the model, padding included, over a run.

    Args:
        forwards (`Sequence[RecordedForward]`): Of one call.
        without_prefill (`bool`): Leave out the first forward, which reads the prompts.

    Raises:
        ValueError: if nothing is left to count.
    """
    forwards = forwards[1:] if without_prefill else forwards
    num_positions = sum(forward.num_positions for forward in forwards)
    if num_positions == 0:
        raise ValueError(
            "`forwards` must hold a forward to count, besides the first one if that is left out, got none. Decode "
            "more tokens."
        )
    return sum(forward.num_masked for forward in forwards) / num_positions


def context_growth(
    model: Any,
    contexts: tuple[int, int] = (256, 4096),
    tokens_per_forward: float = 4.0,
    max_new_tokens: int = 32,
    repetitions: int = 3,
    **options,
) -> ContextGrowth:
    """How the time of a denoising step grows from a short prompt to a long one; batch size 1, medians.

    The first forward, which reads the prompt, is not counted: neither in `generate` nor in the forwards alone, which
    take turns.

    Args:
        model (`D2FForBlockDiffusion`): Has positions for prompt and response.
        contexts (`tuple[int, int]`): Tokens of the two prompts.
        tokens_per_forward (`float`): Of the script.
        max_new_tokens (`int`): Response tokens; they must take two forwards at least.
        repetitions (`int`): Times of each.
        options: More keywords of `generate`.

    Raises:
        ValueError: if all is decoded in one forward, or without repetitions.
    """
    _check_repetitions(repetitions)
    runs = []
    for context in contexts:
        run = scripted_run(model, 1, tokens_per_forward, context, max_new_tokens, **options)
        forwards = record_forwards(*run)[1:]
        if not forwards:
            raise ValueError(
                f"`max_new_tokens` must be more than the first forward decodes, got {max_new_tokens} for "
                f"{tokens_per_forward} tokens per forward. Raise it."
            )
        runs.append((run, forwards, [], []))
    for _ in range(repetitions):
        for run, forwards, steps, bare in runs:
            steps.append(_decode_seconds(*run) / len(forwards))
            bare.append(_replay_seconds(model, forwards) / len(forwards))
    step_seconds, forward_seconds = (
        (statistics.median(runs[0][kind]), statistics.median(runs[1][kind])) for kind in (2, 3)
    )
    return ContextGrowth(contexts, step_seconds, forward_seconds)


def early_end(
    model: Any,
    response_length: int = 20,
    limits: tuple[int, int] = (64, 2048),
    tokens_per_forward: float = 4.0,
    prompt_length: int = 64,
    repetitions: int = 5,
    **options,
) -> EarlyEnd:
    """What a limit far behind the end of the response costs; batch size 1, the two limits take turns.

    Args:
        model (`D2FForBlockDiffusion`): Has positions for the prompt and the larger limit.
        response_length (`int`): Tokens up to and including the EOS.
        limits (`tuple[int, int]`): Two `max_new_tokens`.
        tokens_per_forward (`float`): Of the script.
        prompt_length (`int`): Tokens of the prompt.
        repetitions (`int`): Pairs of times.
        options: More keywords of `generate`.

    Raises:
        ValueError: for a response that does not end before the limits, or without repetitions.
    """
    _check_repetitions(repetitions)
    if response_length > min(limits):
        raise ValueError(
            f"`response_length` must be within both `limits`, got {response_length} and {limits}. Lower it."
        )
    script = ScriptedAcceptance([tokens_per_forward], [response_length])
    systems, num_forwards, ratios = [], [], []
    for limit in limits:
        system, inputs, _ = scripted_run(model, 1, tokens_per_forward, prompt_length, limit, **options)
        systems.append(system)
        num_forwards.append(len(record_forwards(system, inputs, script)))
    for _ in range(repetitions):
        (_, first), (_, second) = (timed_call(system, inputs, script) for system in systems)
        ratios.append(second / first)
    return EarlyEnd(limits, (num_forwards[0], num_forwards[1]), statistics.median(ratios))


def merged_adapter_gain(
    system: System,
    inputs: Mapping[str, torch.Tensor],
    script: ScriptedAcceptance | None = None,
    rank: int = 32,
    repetitions: int = 5,
) -> float:
    """Tokens per second with an adapter merged into the weights / with the adapter on top; the two take turns.

    The adapter is a random LoRA on the attention projections, as the paper's; on top it stays in the dtype that peft
    gives it. Both models are copies of that of `system`.

    Args:
        system (`System`): A block-diffusion model without an adapter, and the keywords of `generate`.
        inputs (`Mapping[str, torch.Tensor]`): Prompts `(B, L)`.
        script (`ScriptedAcceptance`, *optional*): Replaces the choice of tokens. Without it the two models may decode
            different tokens, because rounding differs.
        rank (`int`): Of the adapter.
        repetitions (`int`): Pairs of times; the median of their ratios is returned.
    """
    _check_repetitions(repetitions)
    projections = list(system.model.config.attention_projections)
    lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=projections, init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(system.model), lora).eval()
    merged = copy.deepcopy(adapted).merge_and_unload()
    return gain(System(merged, system.options), System(adapted, system.options), inputs, script, repetitions)


def gain(
    system: System,
    baseline: System,
    inputs: Mapping[str, torch.Tensor],
    script: ScriptedAcceptance | None = None,
    repetitions: int = 5,
) -> float:
    """Tokens per second of `system` / those of `baseline` with the same prompts `(B, L)`; the two take turns.

    Args:
        system, baseline (`System`): Block-diffusion models and the keywords of `generate`.
        inputs (`Mapping[str, torch.Tensor]`): Prompts `(B, L)`.
        script (`ScriptedAcceptance`, *optional*): Replaces the choice of tokens.
        repetitions (`int`): Pairs of times behind one that warms up; the median of their ratios is returned.
    """
    _check_repetitions(repetitions)
    ratios = []
    for repetition in range(repetitions + 1):
        rates = []
        for one in (system, baseline):
            output, seconds = timed_call(one, inputs, script)
            rates.append(sum(len(row) for row in responses(one, inputs, output)) / seconds)
        if repetition > 0:
            ratios.append(rates[0] / rates[1])
    return statistics.median(ratios)


def rows_as_alone(system: System, prompts: Sequence[Mapping[str, torch.Tensor]], pad_token_id: int) -> float:
    """Percentage of the rows of one batch that get the response that they get alone.

    Args:
        system (`System`): In float32, because in narrower types rounding depends on the shape of the batch.
        prompts (`Sequence[Mapping[str, torch.Tensor]]`): The rows, `(1, L)` each.
        pad_token_id (`int`): The token that pads.
    """
    together, _ = answer_in_batches(system, prompts, pad_token_id, len(prompts))
    alone, _ = answer_in_batches(system, prompts, pad_token_id, 1)
    num_same = sum(row == lone for row, lone in zip(together, alone, strict=True))
    return 100 * num_same / len(prompts)


def _decode_seconds(system: System, inputs: Mapping[str, torch.Tensor], script: ScriptedAcceptance) -> float:
    """Wall time of a call from the start of its second forward, less the time in the script."""
    model = block_diffusion_model(system.model)
    starts: list[tuple[float, float]] = []  # of each forward, and time in the script before it

    def noting(forward: Callable) -> Callable:
        def call(**kwargs):
            if len(starts) == 1:
                wait_for(model.device)
            starts.append((time.perf_counter(), script.seconds))
            return forward(**kwargs)

        return call

    with replaced_method(model, "forward", noting):
        timed_call(system, inputs, script)
    start, script_seconds = starts[1]
    return time.perf_counter() - start - (script.seconds - script_seconds)


def _replay_seconds(model: Any, forwards: Sequence[RecordedForward]) -> float:
    wait_for(model.device)
    start = time.perf_counter()
    replay_forwards(model, forwards)
    wait_for(model.device)
    return time.perf_counter() - start


def _check_repetitions(repetitions: int) -> None:
    if repetitions < 1:
        raise ValueError(f"`repetitions` must be at least 1, got {repetitions}. Five give a steady median.")


def num_logits(logits_to_keep: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> int:
    """M: from rows and positions, `(M,)` each, or from a bool mask `(B, L)`."""
    return len(logits_to_keep[0]) if isinstance(logits_to_keep, tuple) else int(logits_to_keep.sum())


def _copied(value: Any) -> Any:
    """`value` with its tensors copied, because a loop may write its next window into the same ones."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    return value
