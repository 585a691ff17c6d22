"""The options of `generate` as flags."""

import pytest
from d2f_hf.modeling.generation_config_d2f import OPTIONS
from transformers import GenerationConfig

from cli_runs import d2f
from d2f_cli.decoding_flags import NOT_A_FLAG, OF_TRANSFORMERS, first_sentences, flags


def test_each_declared_option_is_a_flag():
    assert set(flags()) == {*OPTIONS, *OF_TRANSFORMERS} - set(NOT_A_FLAG)
    help_text = d2f("generate", "--help").stdout
    for name in flags():
        assert f"--{name.replace('_', '-')}" in help_text


def test_the_type_of_a_flag_meets_the_check_of_its_option():
    samples = {int: 1, float: 0.5, bool: True}
    for name, (kind, text) in flags().items():
        assert len(text) > 10
        if name in OPTIONS and kind is not str:
            assert OPTIONS[name].check.is_met_by(samples[kind]), name


def test_the_others_are_options_of_transformers():
    assert all(hasattr(GenerationConfig(), name) for name in OF_TRANSFORMERS if name != "seed")


def test_first_sentences_of_a_docstring():
    text = """What.

    Args:
        one (`int`, *optional*): Tau. The first thing
            of all, with `code`. More.
        two, three (`float`): Both of them. More.

    Raises:
        ValueError: never.
    """
    told = "Tau. The first thing of all, with code."
    assert first_sentences(text) == {"one": told, "two": "Both of them.", "three": "Both of them."}


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--confidence-threshold", "3"], "`confidence_threshold` must be a number in [0, 1], got 3.0"),
        (["--decoding", "magic"], "`decoding` must be one of"),
        (["--max-new-tokens", "0"], "`max_new_tokens` must be an integer of at least 1"),
        (["--decoding", "d2f", "--steps", "3"], "`steps` (got 3) is not used by decoding='d2f'"),
        (["--decoding", "vanilla", "--confidence-threshold", "0.5"], "not used by decoding='vanilla'"),
    ],
    ids=str,
)
def test_a_bad_value_is_a_wrong_call_before_a_model_is_looked_for(arguments, named):
    result = d2f("generate", "/no/such/model", "hello", *arguments)
    assert result.exit_code == 2 and named in " ".join(result.stderr.split())
