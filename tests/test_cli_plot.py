"""`d2f plot`: what is drawn of a report and of a trace."""

import json

import pytest

from cli_runs import QUESTION, ROOT, as_json, d2f, succeeds
from d2f_cli.plot import COLOURS, STATES, curve, timeline_states

ROWS = [
    {"label": f"confidence_threshold={t}", "model": m, "score": s, "tokens_per_second": v, "tokens_per_forward": v / 9}
    for t, m, s, v in ((0.9, "a", 90.0, 20.0), (0.5, "a", 70.0, 30.0), (0.9, "b", 80.0, 10.0))
]


@pytest.mark.parametrize("x", ["tokens_per_second", "tokens_per_forward"])
def test_a_curve_has_a_line_per_model_and_a_point_per_row(x):
    (axes,) = curve(ROWS, x).axes
    lines = {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.get_lines()}
    assert lines == {"a": [(ROWS[0][x], 90.0), (ROWS[1][x], 70.0)], "b": [(ROWS[2][x], 80.0)]}
    looks = {(line.get_color(), line.get_marker()) for line in axes.get_lines()}
    assert len({colour for colour, _ in looks}) == len({marker for _, marker in looks}) == 2
    assert {text.get_text() for text in axes.texts} == {"0.9", "0.5"}


def test_states_by_hand():
    """A prompt of 2, blocks of 2; token 1 is decoded late, and the first block committed after the third forward."""
    steps = [
        {"window_start": 0, "window_length": 4, "committed_length": 0, "accepted": [(2, 7)]},
        {"window_start": 2, "window_length": 4, "committed_length": 2, "accepted": [(3, 7), (5, 7)]},
        {"window_start": 2, "window_length": 4, "committed_length": 2, "accepted": [], "remasked": [5]},
        {"window_start": 4, "window_length": 2, "committed_length": 4, "accepted": [(4, 7), (5, 7)]},
    ]
    states = timeline_states({"prompt_length": 2, "num_tokens": 4, "trace": steps})
    assert states == [
        ["accepted now", "masked", None, None],
        ["decoded", "accepted now", "masked", "accepted now"],
        ["decoded", "decoded", "masked", "masked"],
        ["committed", "committed", "accepted now", "accepted now"],
    ]


def test_states_of_a_verified_answer():
    step = {"window_start": 0, "window_length": 3, "committed_length": 0, "accepted": [(2, 7)], "drafted": [(3, 8)]}
    assert timeline_states({"prompt_length": 2, "num_tokens": 3, "trace": [step]}) == [["accepted now", "draft", None]]


@pytest.mark.parametrize("kind", ["report", "trace", "docs/benchmarks/2026-11-30-samplers.json"])
def test_pictures_are_written_and_the_same_each_time(kind, tmp_path):
    file = tmp_path / "in.json"
    if kind == "report":
        file.write_text(json.dumps({"rows": ROWS}))
    elif kind == "trace":
        succeeds("generate", "reference", QUESTION, "--trace", str(file))
    else:
        file = ROOT / kind
    outputs = [str(tmp_path / name) for name in ("a.png", "a.svg", "b.svg")]
    arguments = [argument for output in outputs for argument in ("--output", output)]
    found = as_json("plot", str(file), *arguments, "--x", "tokens_per_forward", "--title", "A title")
    assert found == {"kind": "timeline" if kind == "trace" else "curve", "output": outputs}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "a.svg").read_text()
    assert svg == (tmp_path / "b.svg").read_text() and "A title" in svg and "</svg>" in svg


def luminance(colour: str) -> float:
    """Relative luminance of WCAG."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_states_that_touch_differ_in_grey_too():
    for one, other in (("masked", "accepted now"), ("masked", "decoded"), ("decoded", "committed")):
        pale, dark = sorted((luminance(STATES[one]), luminance(STATES[other])), reverse=True)
        assert (pale + 0.05) / (dark + 0.05) > 1.5, (one, other)
    assert len(set(COLOURS)) == len(COLOURS) and len(set(STATES.values())) == len(STATES)


@pytest.mark.parametrize(
    "content, arguments, code, named",
    [
        ("{}", ["--output", "x.jpg"], 2, "must end in one of"),
        ("{}", ["--output", "x.png"], 1, "is neither"),
        ("[1]", ["--output", "x.png"], 1, "is neither"),
        ("no", ["--output", "x.png"], 1, "FILE must be JSON"),
        ('{"rows": [{"label": "a", "score": null}]}', ["--output", "x.png"], 1, "must have a score"),
        ("{}", [], 2, "--output"),
    ],
)
def test_what_cannot_be_drawn_is_said(content, arguments, code, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.json").write_text(content)
    result = d2f("plot", "in.json", *arguments)
    assert result.exit_code == code and named in " ".join(result.stderr.split())
    assert not list(tmp_path.glob("x.*"))
