"""The mask token of a checkpoint: where it is named, and how an autoregressive model and its tokenizer get one.

Tokenizer files are read as JSON. No tokenizer is made, so that no code of a checkpoint is executed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from d2f_hf.checkpoint_files import find_file, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What mask tokens are called, where a tokenizer has one that it does not call its mask token.
MASK_TOKENS = ("<|mask|>", "<|MASK|>", "|<MASK>|", "[MASK]", "<mask>", "<|mdm_mask|>")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that the tokenizer files of a checkpoint name.

    Args:
        ids (`dict[str, int]`): Of all tokens.
        added (`frozenset[str]`): Those that were added to the model's own.
        mask_token (`str`, *optional*): What the tokenizer calls its mask token.
        next_id (`int`): The one behind the highest, which a tokenizer gives to the next token that is added.
    """

    ids: dict[str, int]
    added: frozenset[str]
    mask_token: str | None
    next_id: int

    @property
    def mask_token_id(self) -> int | None:
        """The id of the token that stands for a mask, if there is one."""
        if self.mask_token in self.ids:
            return self.ids[self.mask_token]
        return next((self.ids[name] for name in MASK_TOKENS if name in self.added), None)


def read_vocabulary(folder_or_id: str, hub: dict[str, Any]) -> Vocabulary | None:
    """The vocabulary of a checkpoint; `None` if there is no file that can be read as JSON."""

    def values_of(name: str) -> dict[str, Any]:
        file = find_file(folder_or_id, name, hub)
        return {} if file is None else read_json(file)

    own: dict[str, int] = {}
    added: dict[str, int] = {}
    tokenizer = values_of("tokenizer.json")
    if tokenizer:
        vocab = (tokenizer.get("model") or {}).get("vocab") or {}
        # A unigram model has pairs of token and score, in the order of their ids.
        own = dict(vocab) if isinstance(vocab, dict) else {pair[0]: i for i, pair in enumerate(vocab)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    else:
        own = {name: i for name, i in values_of("vocab.json").items() if isinstance(i, int)}
    added |= {name: i for name, i in values_of("added_tokens.json").items() if isinstance(i, int)}
    settings = values_of("tokenizer_config.json")
    for i, token in (settings.get("added_tokens_decoder") or {}).items():
        added[token["content"]] = int(i)
    if not own and not added:
        return None
    named = settings.get("mask_token") or values_of("special_tokens_map.json").get("mask_token")
    mask_token = named.get("content") if isinstance(named, dict) else named
    ids = {**own, **added}
    return Vocabulary(ids, frozenset(added), mask_token, next_id=max(ids.values()) + 1)


def named_mask_token(token: str, vocabulary: Vocabulary | None, base: str) -> int:
    """The id of a mask token that the caller names by its text."""
    if not isinstance(token, str) or not token:
        raise ValueError(f"`mask_token` must be a token of the vocabulary, got {token!r}. An id is `mask_token_id`.")
    if vocabulary is None:
        raise ValueError(
            f"`mask_token` (got {token!r}) needs a tokenizer.json, a vocab.json or a tokenizer_config.json in {base}, "
            "but there is none. Pass the id of the token as `mask_token_id`."
        )
    if token not in vocabulary.ids:
        raise ValueError(
            f"`mask_token` must be a token of the vocabulary of {base}, but it has no {token!r}. Leave it out, and an "
            "autoregressive model gets a new token. Or pass `mask_token_id`."
        )
    return vocabulary.ids[token]


def give_mask_row(model: "PreTrainedModel", mask_token_id: int) -> None:
    """Makes a token that the model was not trained with its mask token.

    Its row of the embedding becomes the mean of the others, so that it says nothing in particular, and so does its
    row of the head: its logit is then the mean of the others, and never the highest. A row behind the last one is
    appended. The logits of all other tokens stay as they are.

    Raises:
        ValueError: for an id further behind, or weights that are not on a device as a whole.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    num_rows = embedding.weight.shape[0]
    if not 0 <= mask_token_id <= num_rows:
        raise ValueError(
            f"`mask_token_id` must be an id of the vocabulary or the one behind it (0 .. {num_rows}), but it is "
            f"{mask_token_id}."
        )
    is_tied = head.weight is embedding.weight
    for layer in (embedding,) if is_tied else (embedding, head):
        weight = layer.weight
        if weight.is_meta or hasattr(weight, "full_tensor"):
            raise ValueError(
                "The embedding and the head must be on a device as a whole to get a row for the mask token, but they "
                "are offloaded or sharded. Load the model with device_map='cpu', save it, and load that one."
            )
        others = torch.ones(num_rows, dtype=torch.bool, device=weight.device)
        others[mask_token_id : mask_token_id + 1] = False
        with torch.no_grad():
            mean = weight[others].mean(0, dtype=torch.float32).to(weight.dtype)
            if mask_token_id < num_rows:
                weight[mask_token_id] = mean
            else:
                rows = torch.cat([weight, mean[None]])
                layer.weight = nn.Parameter(rows, requires_grad=weight.requires_grad)
    if is_tied:
        head.weight = embedding.weight
    embedding.num_embeddings = head.out_features = len(embedding.weight)
    model.config.vocab_size = len(embedding.weight)
    model.config.mask_token_id = mask_token_id


def add_mask_token(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", token: str = "<|mask|>") -> int:
    """Makes model and tokenizer agree on a mask token; one that is not in the vocabulary yet is added to both.

    ```python
    model, tokenizer = load_d2f_model(base), AutoTokenizer.from_pretrained(base)
    add_mask_token(model, tokenizer)
    model.save_pretrained("diffusion")
    tokenizer.save_pretrained("diffusion")
    ```

    Args:
        model ([`D2FForBlockDiffusion`]): Keeps the mask token that its configuration names. Without one it gets the
            one of the tokenizer, or a new one, as in [`load_d2f_model`].
        tokenizer (`PreTrainedTokenizerBase`): Is changed: the mask token becomes its `mask_token`.
        token (`str`): What a new token is called.

    Returns:
        `int`: The id of the mask token.

    Raises:
        ValueError: if the tokenizer would give a new token another id than the model has for it.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    mask_token_id = model.config.mask_token_id
    if mask_token_id is None:
        known = [name for name in (tokenizer.mask_token, token, *MASK_TOKENS) if name in vocabulary]
        if known:
            mask_token_id = vocabulary[known[0]]
            embedding: Any = model.get_input_embeddings()
            if mask_token_id >= len(embedding.weight):
                give_mask_row(model, mask_token_id)
            model.config.mask_token_id = mask_token_id
        else:
            mask_token_id = _next_id(vocabulary)
            give_mask_row(model, mask_token_id)
    names = {i: name for name, i in vocabulary.items()}
    name = names.get(mask_token_id, token)
    if mask_token_id not in names:
        next_id = _next_id(vocabulary)
        if token in vocabulary:
            raise ValueError(
                f"`token` must be new to the tokenizer, because no token of it has the model's `mask_token_id` "
                f"{mask_token_id}, but {token!r} is its token {vocabulary[token]}. Pass another `token`, or load the "
                f"model with `mask_token_id={vocabulary[token]}`."
            )
        if next_id != mask_token_id:
            raise ValueError(
                f"`mask_token_id` of the model must be the id that the tokenizer gives to its next token, {next_id}, "
                f"but it is {mask_token_id}. Load the model with `mask_token_id={next_id}`."
            )
    tokenizer.add_special_tokens({"mask_token": name})
    if tokenizer.mask_token_id != mask_token_id:
        raise ValueError(
            f"The tokenizer gave {name!r} the id {tokenizer.mask_token_id}, but the model's `mask_token_id` is "
            f"{mask_token_id}. Load both again, the model with `mask_token_id={tokenizer.mask_token_id}`."
        )
    return mask_token_id


def _next_id(vocabulary: dict[str, int]) -> int:
    return max(vocabulary.values(), default=-1) + 1
