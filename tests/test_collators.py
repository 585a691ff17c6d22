"""Which collators are taken, and what the default one does."""

import pytest
from transformers import DataCollatorWithPadding, DefaultDataCollator, default_data_collator

from d2f_hf import D2FTrainer
from tiny_models import letter_tokenizer
from tiny_training import RAW, arguments, letters_model, tiny_dataset, tiny_model


@pytest.mark.parametrize(
    "collator", [default_data_collator, DefaultDataCollator(), lambda rows: {}, "noise"], ids=lambda c: str(type(c))
)
def test_a_collator_of_another_kind_is_refused(tmp_path, collator):
    if collator == "noise":
        collator = D2FTrainer(tiny_model(), arguments(tmp_path)).data_collator
    with pytest.raises(ValueError, match="`data_collator` must be a `D2FDataCollator`"):
        D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=tiny_dataset(), data_collator=collator)


def test_a_stock_collator_that_only_pads_means_the_default(tmp_path):
    """It ended in an AttributeError about `block_size`. One that pads to a length cannot be followed."""
    tokenizer, options = letter_tokenizer(), {"train_dataset": RAW, "processing_class": letter_tokenizer()}
    padding = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=16)
    trainer = D2FTrainer(letters_model(), arguments(tmp_path), data_collator=padding, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[1] % 16 == 0 and (batch["prompt_lengths"] == 4).all()
    trainer.train()
    fixed = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=32)
    with pytest.raises(ValueError, match="`data_collator` must be a `D2FDataCollator`"):
        D2FTrainer(letters_model(), arguments(tmp_path), data_collator=fixed, **options)
