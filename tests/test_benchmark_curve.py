"""The curve of score against speed."""

import json

import pytest
from transformers import AutoTokenizer

from benchmarks import curve
from reference_models import HERE
from untrained_reference_models import save_untrained_models


@pytest.mark.slow
def test_the_curve_is_drawn(tmp_path, monkeypatch, capsys):
    models = save_untrained_models(tmp_path / "models", AutoTokenizer.from_pretrained(HERE / "tokenizer"))
    monkeypatch.setattr(curve, "BLOCK_SIZES", (8, 16))
    monkeypatch.setattr(curve, "THRESHOLDS", (0.5, 0.9, 0.98))
    curve.main(["--models", str(models), "--problems", "1", "--output", str(tmp_path)])
    rows = (tmp_path / "curve.csv").read_text().splitlines()
    assert rows[0] == "block_size,confidence_threshold,score,tokens_per_forward,tokens_per_second"
    assert [row.split(",")[:2] for row in rows[1:]] == [[k, t] for k in ("8", "16") for t in ("0.5", "0.9", "0.98")]
    assert (tmp_path / "curve.png").stat().st_size > 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["curve"]) == 6


def test_arguments_that_mean_nothing_end_the_script(capsys):
    with pytest.raises(SystemExit):
        curve.main(["--problems", "0"])
    assert "--problems must be at least 1, got 0" in capsys.readouterr().err
