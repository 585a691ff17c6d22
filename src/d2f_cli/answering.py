"""One answer: a call of `generate`, and what is said of it."""

from typing import Any

import torch
from rich.console import Console

from d2f_cli.console import waiting
from d2f_cli.models import Loaded
from d2f_cli.terminal_view import LiveScreen, ResponseView
from d2f_hf.live_view import LiveResponse

MAX_NEW_TOKENS = 256  # that of a block-diffusion model where nobody says otherwise
WITH_TRACE = ("d2f", "autoregressive", "verified")


def respond(
    loaded: Loaded, ids: torch.LongTensor, options: dict[str, Any], screen: Console | None = None
) -> tuple[dict[str, Any], LiveResponse]:
    """Answers the prompt `ids` `(1, L)`, drawn on `screen` while it is decoded.

    Returns:
        What `--json` says of it, and the response as it was streamed.
    """
    response = LiveResponse.of(loaded.model, options)
    if screen is None:
        with waiting("decoding"):
            figures = finish(response, call_generate(loaded, ids, options, response))
    else:
        view = ResponseView(response, loaded.tokenizer)
        with LiveScreen(view, [view], screen) as live:
            response.changed = live.refresh
            figures = finish(response, call_generate(loaded, ids, options, response))
    return {"response": loaded.text(response.decoded), **figures}, response


def call_generate(
    loaded: Loaded, ids: torch.LongTensor, options: dict[str, Any], streamer: LiveResponse | None
) -> Any:
    """`generate` with flags: what it returns with `return_dict_in_generate`."""
    options = generate_options(loaded, options)
    if (seed := options.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    decoding = options.get("decoding") or getattr(loaded.model.generation_config, "decoding", None)
    if loaded.is_block_diffusion and decoding in WITH_TRACE:
        options["output_trace"] = True
    mask = torch.ones_like(ids)
    streamer.start()
    return loaded.model.generate(
        input_ids=ids, attention_mask=mask, return_dict_in_generate=True, streamer=streamer, **options
    )


def generate_options(loaded: Loaded, options: dict[str, Any]) -> dict[str, Any]:
    """Flags as keywords of `generate` of this model."""
    options = dict(options)
    if "stop_strings" in options:
        options["tokenizer"] = loaded.tokenizer
    if not loaded.is_block_diffusion:
        options.setdefault("max_new_tokens", MAX_NEW_TOKENS)
    return options


def finish(response: LiveResponse, output: Any) -> dict[str, Any]:
    """The figures of a response, its forwards as `generate` counts them."""
    if getattr(output, "num_forward_passes", None) is not None:
        response.num_forward_passes = int(output.num_forward_passes[0])
    return {
        "num_tokens": response.num_tokens,
        "num_forward_passes": response.num_forward_passes,
        "tokens_per_forward": round(response.tokens_per_forward or 0.0, 3),
        "seconds": round(response.seconds, 4),
        "tokens_per_second": round(response.tokens_per_second, 1),
    }
