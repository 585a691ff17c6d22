"""`d2f chat`: what the model sees of a conversation."""

import json

from cli_runs import QUESTION, d2f, reference, succeeds
from d2f_cli import chat
from d2f_cli.answering import respond


def conversation(*said: str) -> list[dict[str, str]]:
    """The messages, answers included, when the model answers one after the other."""
    loaded, messages = reference(), []
    for text in said:
        messages.append({"role": "user", "content": text})
        answer, _ = respond(loaded, loaded.prompt(messages), {"max_new_tokens": 60})
        messages.append({"role": "assistant", "content": answer["response"]})
    return messages


def test_each_answer_sees_the_conversation_so_far():
    said = [QUESTION, "And now?"]
    output = succeeds("chat", "reference", "--json", "--max-new-tokens", "60", input="\n\n".join(said) + "\n")
    turns = [json.loads(line) for line in output.splitlines()]
    expected = conversation(*said)
    assert [turn["response"] for turn in turns] == [message["content"] for message in expected[1::2]]
    assert turns[1]["messages"] == expected[:3]


def test_reset_forgets_it_and_exit_ends_it():
    said = f"{QUESTION}\n/reset\nAnd now?\n/exit\nMore\n"
    output = succeeds("chat", "reference", "--json", "--max-new-tokens", "60", input=said)
    turns = [json.loads(line) for line in output.splitlines()]
    assert len(turns) == 2 and [len(turn["messages"]) for turn in turns] == [1, 1]
    assert turns[1]["response"] == conversation("And now?")[1]["content"]


def test_piped_it_prints_answers_alone():
    output = succeeds("chat", "reference", "--max-new-tokens", "60", input=f"{QUESTION}\n")
    assert output == conversation(QUESTION)[1]["content"] + "\n"


def test_a_person_can_stop_an_answer(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "respond", interrupted)
    messages = [{"role": "user", "content": "hello"}]
    assert chat.answer_turn(reference(), messages, None, {}, is_person=True, as_json=False) is None
    assert "stopped" in capsys.readouterr().err
    assert d2f("chat", "reference", input="hello\n").exit_code == 130
