"""Examples to token ids, token ids to batches: `d2f_hf.data`."""

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from d2f_hf.data import D2FDataCollator, tokenize_dataset, tokenize_example

# The template ends each message with a newline behind the EOS, as that of Qwen2 does.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' <eos> \n ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
WORDS = ["<pad>", "<eos>", "<mask>", "<unk>", "<user>", "<assistant>", "\n", *"abcdefgh"]
PAD, EOS = 0, 1


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; a newline is a word."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


def words(tokenizer, ids) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens([int(token) for token in ids]))


def split(tokenizer, example: dict) -> tuple[str, str]:
    """Prompt and response of a tokenized example, in words."""
    ids, prompt_length = example["input_ids"], example["prompt_length"]
    return words(tokenizer, ids[:prompt_length]), words(tokenizer, ids[prompt_length:])


def chat(*contents: str) -> dict:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


# ---- tokenize_example ----


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, None])
def test_prompt_and_completion_are_concatenated_whether_there_is_a_chat_template_or_not(tokenizer, template):
    tokenizer.chat_template = template
    example = tokenize_example({"prompt": "a b", "completion": "c d e"}, tokenizer)
    assert split(tokenizer, example) == ("a b", "c d e <eos>")


def test_no_special_tokens_are_added_to_prompt_and_completion(tokenizer):
    """A BOS in front of the completion would stand in the middle of the sequence, where it never is at inference."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<mask> $A", special_tokens=[("<mask>", 2)]
    )
    assert words(tokenizer, tokenizer("a")["input_ids"]) == "<mask> a"
    example = tokenize_example({"prompt": "a", "completion": "b"}, tokenizer)
    assert split(tokenizer, example) == ("a", "b <eos>")


def test_an_eos_that_is_already_there_is_not_doubled(tokenizer):
    example = tokenize_example({"prompt": "a", "completion": "b <eos>"}, tokenizer)
    assert split(tokenizer, example) == ("a", "b <eos>")


def test_an_empty_completion_is_answered_with_eos(tokenizer):
    assert split(tokenizer, tokenize_example({"prompt": "a", "completion": ""}, tokenizer)) == ("a", "<eos>")


@pytest.mark.parametrize(
    ("contents", "prompt", "response"),
    [
        (["a b", "c d"], "<user> a b <eos> \n <assistant>", "c d <eos>"),
        (
            ["a", "b", "c", "d e"],
            "<user> a <eos> \n <assistant> b <eos> \n <user> c <eos> \n <assistant>",
            "d e <eos>",
        ),
        (["a", ""], "<user> a <eos> \n <assistant>", "<eos>"),
    ],
)
def test_the_last_assistant_message_is_the_response_and_ends_at_its_eos(tokenizer, contents, prompt, response):
    assert split(tokenizer, tokenize_example(chat(*contents), tokenizer)) == (prompt, response)


def test_a_template_without_eos_gets_one(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE.replace(" <eos>", "")
    example = tokenize_example(chat("a", "b"), tokenizer)
    assert split(tokenizer, example) == ("<user> a \n <assistant>", "b \n <eos>")


def test_the_prompt_of_a_chat_has_the_tokens_that_it_has_at_inference(tokenizer):
    """`apply_chat_template` gives a dict in transformers 5 and a list in 4 unless told: both are checked here."""
    messages = chat("a b", "c d")["messages"]
    example = tokenize_example({"messages": messages}, tokenizer)
    prompt_ids = example["input_ids"][: example["prompt_length"]]
    for return_dict in (True, False):
        inference = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=return_dict)
        assert list(inference["input_ids"] if return_dict else inference) == prompt_ids
    assert all(type(token) is int for token in example["input_ids"])


def test_tokenized_examples_are_taken_as_they_are(tokenizer):
    example = {"input_ids": torch.tensor([4, 7, 8]), "prompt_length": torch.tensor(1), "messages": None}
    assert tokenize_example(example, tokenizer) == {"input_ids": [4, 7, 8], "prompt_length": 1}


def test_a_long_response_is_cut_and_then_has_no_eos(tokenizer):
    example = tokenize_example({"prompt": "a b", "completion": "c d e"}, tokenizer, max_length=4)
    assert split(tokenizer, example) == ("a b", "c d")
    exact = tokenize_example({"prompt": "a b", "completion": "c d e"}, tokenizer, max_length=6)
    assert split(tokenizer, exact) == ("a b", "c d e <eos>")


@pytest.mark.parametrize(
    "example",
    [
        {"prompt": "a b c", "completion": "d"},
        {"input_ids": [7, 8, 9, 10], "prompt_length": 3},
        chat("a", "b"),
    ],
    ids=["prompt", "input_ids", "messages"],
)
def test_a_prompt_that_leaves_no_room_for_a_response_is_an_error(tokenizer, example):
    with pytest.raises(ValueError, match=r"must be shorter than `max_length` \(3\), got \d"):
        tokenize_example(example, tokenizer, max_length=3)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"prompt": "", "completion": "a"}, "must have at least one token"),
        ({"input_ids": [7, 8], "prompt_length": 0}, "must have at least one token"),
        ({"input_ids": [7, 8], "prompt_length": 2}, "must leave at least one response token"),
        ({"input_ids": [7, 8]}, "must have `input_ids` and `prompt_length`"),
        ({"prompt": "a"}, r"must have `prompt` and `completion`, .*got \['prompt'\]"),
        ({"text": "a"}, "must have `prompt` and `completion`"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "must be strings, got list and str"),
        (chat("a"), r"ends with one of the assistant, got the roles \['user'\]"),
        (chat("a", "b", "c"), "ends with one of the assistant"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "at least two messages"),
        ({"messages": []}, "at least two messages"),
    ],
)
def test_examples_without_prompt_or_response_are_errors_that_say_so(tokenizer, example, message):
    with pytest.raises(ValueError, match=message):
        tokenize_example(example, tokenizer)


def test_messages_without_a_chat_template_are_an_error(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="need a tokenizer with a chat template"):
        tokenize_example(chat("a", "b"), tokenizer)


def test_a_template_that_rewrites_the_prompt_is_an_error(tokenizer):
    """Such a template, e.g. one that drops earlier reasoning, would train on prompts that inference never sees."""
    tokenizer.chat_template = "{{ messages | length }} {{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="must render so that the chat starts with its own prompt"):
        tokenize_example(chat("a", "b"), tokenizer)


def test_a_tokenizer_without_eos_is_an_error(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="`tokenizer` must have an EOS token"):
        tokenize_example({"prompt": "a", "completion": "b"}, tokenizer)


# ---- D2FDataCollator ----


def collate(*examples: dict, **options) -> dict[str, torch.Tensor]:
    return D2FDataCollator(block_size=4, eos_token_id=EOS, pad_token_id=PAD, **options)(examples)


def picture(batch: dict[str, torch.Tensor]) -> list[str]:
    """A row as letters: p prompt, a answer, e EOS in the loss, . padding."""
    rows = []
    for ids, mask, prompt_length in zip(
        batch["input_ids"].tolist(), batch["attention_mask"].tolist(), batch["prompt_lengths"].tolist(), strict=True
    ):
        letters = ["p" if i < prompt_length else "e" if token == EOS else "a" for i, token in enumerate(ids)]
        rows.append("".join(letter if seen else "." for letter, seen in zip(letters, mask, strict=True)))
        assert all(token == PAD for token, seen in zip(ids, mask, strict=True) if not seen)
    return rows


@pytest.mark.parametrize(
    ("options", "short", "long"),
    [
        ({}, "ppppppaeeeeeeeee", "ppppppppaaaaaeee"),
        ({"eos_tail": "batch"}, "ppppppaeeeeeeeee", "ppppppppaaaaaeee"),
        ({"eos_tail": "block"}, "ppppppaeee......", "ppppppppaaaaaeee"),
        ({"eos_tail": "none"}, "ppppppae......", "ppppppppaaaaae"),
        ({"eos_tail": "none", "pad_to_multiple_of": 8}, "ppppppae........", "ppppppppaaaaae.."),
        ({"pad_to_multiple_of": 10}, "ppppppaeeeeeeeee....", "ppppppppaaaaaeee...."),
    ],
)
def test_table_of_the_loss_region_for_chats(tokenizer, options, short, long):
    """Prompts, and the EOS inside them, are never in it; the EOS tail is, as far as `eos_tail` says."""
    examples = [chat("b c", "a"), chat("b c d e", "a a a a a")]
    batch = collate(*(tokenize_example(example, tokenizer) for example in examples), **options)
    assert picture(batch) == [short, long]


def test_rows_are_filled_to_the_longest_row_even_if_that_ends_their_last_block_early():
    examples = [{"input_ids": [7, 8, EOS], "prompt_length": 1}, {"input_ids": [7, 7, 8, EOS], "prompt_length": 2}]
    assert picture(collate(*examples)) == ["paeeee", "ppaeee"]
    assert picture(collate(*examples, eos_tail="block")) == ["paeee.", "ppaeee"]


@pytest.mark.parametrize(
    ("prompt_length", "expected"), [(1, "paee"), (2, "ppae"), (3, "pppaeeee"), (4, "ppppaeee"), (5, "pppppaee")]
)
def test_blocks_that_start_with_the_sequence_are_filled_from_there(prompt_length, expected):
    """The last block was filled as if blocks began behind the prompt, so its tail ended inside a block."""
    example = {"input_ids": [7] * prompt_length + [8, EOS], "prompt_length": prompt_length}
    assert picture(collate(example, block_alignment="sequence", eos_tail="block")) == [expected]


@pytest.mark.parametrize("eos_tail", ["batch", "block", "none"])
def test_a_cut_response_is_padded_and_not_taught_to_end_there(tokenizer, eos_tail):
    cut = tokenize_example({"prompt": "a", "completion": "b c d e"}, tokenizer, max_length=3)
    whole = tokenize_example({"prompt": "a", "completion": "b c d e"}, tokenizer)
    assert picture(collate(cut, whole, eos_tail=eos_tail))[0].rstrip(".") == "paa"


def test_a_full_last_block_gets_no_further_block():
    assert picture(collate({"input_ids": [7, 8, 8, 8, EOS], "prompt_length": 1})) == ["paaae"]


def test_the_batch_holds_the_tokens_of_its_examples():
    batch = collate({"input_ids": [9, 8, 7, EOS], "prompt_length": 2, "ignored": "text"})
    assert batch["input_ids"].tolist() == [[9, 8, 7, EOS, EOS, EOS]]
    assert batch["prompt_lengths"].tolist() == [2]
    assert {name: value.dtype for name, value in batch.items()} == dict.fromkeys(batch, torch.int64)


def test_padding_is_eos_where_there_is_no_pad_token():
    batch = D2FDataCollator(block_size=4, eos_token_id=EOS, eos_tail="none", pad_to_multiple_of=4)(
        [{"input_ids": [7, 8, EOS], "prompt_length": 1}]
    )
    assert batch["input_ids"].tolist() == [[7, 8, EOS, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "`features` must hold at least one example"),
        ([{"prompt": "a", "completion": "b"}], "Map the dataset with `tokenize_example`"),
        ([{"input_ids": [7, 8]}], "must have `input_ids` and `prompt_length`"),
        ([{"input_ids": [7, 8], "prompt_length": 0}], "one prompt and one response token, got 0 of 2"),
        ([{"input_ids": [7, 8], "prompt_length": 2}], "one prompt and one response token, got 2 of 2"),
    ],
)
def test_batches_that_cannot_be_collated_are_errors(examples, message):
    with pytest.raises(ValueError, match=message):
        collate(*examples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "`block_size` must be at least 1"),
        ({"block_size": 4.5}, "`block_size` must be at least 1, and an integer, got 4.5"),
        ({"eos_tail": "all"}, "`eos_tail` must be one of"),
        ({"block_alignment": "response"}, "`block_alignment` must be one of"),
        ({"pad_to_multiple_of": 0}, "`pad_to_multiple_of` must be at least 1"),
    ],
)
def test_wrong_options_of_the_collator_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        D2FDataCollator(**{"block_size": 4, "eos_token_id": EOS, **options})


def test_a_default_device_changes_nothing():
    """Batches are made on the host, and the Trainer moves them."""
    examples = {"input_ids": [7, 8, EOS], "prompt_length": 1}, {"input_ids": [7, 7, 8, EOS], "prompt_length": 2}
    expected = collate(*examples)
    with torch.device("meta"):
        found = collate(*examples)
    assert all(found[name].device.type == "cpu" and torch.equal(found[name], expected[name]) for name in expected)


# ---- tokenize_dataset ----


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows, self.epoch = rows, None

    def __iter__(self):
        yield from self.rows

    def set_epoch(self, epoch):
        self.epoch = epoch


def a_generator(rows):
    yield from rows


KINDS = {
    "Dataset": Dataset.from_list,
    "IterableDataset": lambda rows: Dataset.from_list(rows).to_iterable_dataset(),
    "generator": lambda rows: IterableDataset.from_generator(a_generator, gen_kwargs={"rows": rows}),
    "list": list,
    "torch": Rows,
    "torch stream": Stream,
}
RAW = [{"prompt": "a b", "completion": "c d e", "source": "x"}, {"prompt": "a", "completion": "b", "source": "y"}]


def plain(rows) -> list[dict]:
    return [{"input_ids": list(row["input_ids"]), "prompt_length": row["prompt_length"]} for row in rows]


@pytest.mark.parametrize("max_length", [None, 4])
@pytest.mark.parametrize("is_tokenized", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dataset_is_tokenized_and_cut(tokenizer, kind, is_tokenized, max_length):
    """Also in a second pass over it."""
    rows = [tokenize_example(row, tokenizer) for row in RAW] if is_tokenized else RAW
    dataset = tokenize_dataset(KINDS[kind](rows), None if is_tokenized else tokenizer, max_length)
    for _ in range(2):
        found = [dataset[i] for i in range(2)] if kind in ("list", "torch") else dataset
        assert plain(found) == [tokenize_example(row, tokenizer, max_length) for row in RAW]


def test_a_tokenized_dataset_is_returned_as_it_is_and_keeps_its_other_columns(tokenizer):
    rows = [{**tokenize_example(row, tokenizer), "length": 5} for row in RAW]
    for kind in ("Dataset", "IterableDataset", "generator", "list", "torch"):
        dataset = KINDS[kind](rows)
        assert tokenize_dataset(dataset, None) is dataset
    assert tokenize_dataset(KINDS["Dataset"](rows), None, max_length=4)["length"] == [5, 5]
    assert tokenize_dataset(None, None) is None


def test_dictionaries_of_datasets_are_tokenized_one_by_one(tokenizer):
    parts = DatasetDict(first=Dataset.from_list(RAW), second=Dataset.from_list(RAW[1:]))
    found = tokenize_dataset(parts, tokenizer)
    assert {name: len(part) for name, part in found.items()} == {"first": 2, "second": 1}
    assert plain(found["second"]) == [tokenize_example(RAW[1], tokenizer)]


def test_columns_that_are_empty_for_an_example_do_not_count(tokenizer):
    """A dataset of mixed examples has all columns, with None where an example lacks them."""
    dataset = Dataset.from_dict(
        {"messages": [chat("a", "b")["messages"], None], "prompt": [None, "a"], "completion": [None, "c"]}
    )
    found = tokenize_dataset(dataset, tokenizer)
    assert [split(tokenizer, example)[1] for example in found] == ["b <eos>", "c <eos>"]


def test_a_stream_hears_of_its_epoch(tokenizer):
    stream = Stream(RAW)
    tokenize_dataset(stream, tokenizer).set_epoch(3)
    assert stream.epoch == 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "torch stream"])
def test_what_cannot_be_tokenized_is_an_error_at_once(kind):
    with pytest.raises(ValueError, match="`processing_class` must be a tokenizer for a dataset that is not tokenized"):
        tokenize_dataset(KINDS[kind](RAW), None)
    with pytest.raises(ValueError, match="must have `input_ids` and `prompt_length`"):
        tokenize_dataset(KINDS[kind]([{"input_ids": [7, 8]}]), None)


@pytest.mark.parametrize("dataset", [a_generator(RAW), 5, "path/of/a/dataset"])
def test_what_is_no_dataset_is_an_error(dataset):
    with pytest.raises(ValueError, match="`train_dataset`"):
        tokenize_dataset(dataset, None, name="train_dataset")


def test_an_empty_dataset_stays_empty(tokenizer):
    for kind in ("Dataset", "generator", "list", "torch", "torch stream"):
        assert list(tokenize_dataset(KINDS[kind]([]), tokenizer)) == []


@pytest.mark.parametrize(
    "example",
    [
        {"input_ids": [[1, 2, 3]], "prompt_length": 1},
        {"input_ids": "abc", "prompt_length": 1},
        {"input_ids": None, "prompt_length": None},
        {"input_ids": [1, 2, 3], "prompt_length": 1.5},
        {"input_ids": [1, 2, 3], "prompt_length": [1]},
    ],
)
def test_tokenized_examples_of_another_shape_are_refused_by_name(example):
    """They ended in a TypeError of `int()`, and a fractional length was rounded down."""
    with pytest.raises(ValueError, match="prompt_length"):
        D2FDataCollator(block_size=4, eos_token_id=1)([example])
