"""Grade-school word problems with worked solutions, made from a seed.

A problem is a chain: a start value and two to four steps, each an operation on the value before it (add, take,
multiply, share evenly, compare, sell or buy at a price, give change), told about things, money or minutes. The
solution tells the chain again and names each value once, right after the step that makes it; the last line is
`#### <answer>`, as in GSM8K. Because a value is never repeated, it has to be computed: it cannot be copied from
another place in the solution. Which words a solution uses follows from the words of its problem, so what is uncertain
in a solution is its arithmetic.

Splits are disjoint by construction: the chain (unit, start, operations and operands) of a problem is hashed, and the
hash decides whether it belongs to "train", "validation" or "test". No chain of one split occurs in another one,
whatever names and wording dress it.

    python examples/reference_model/word_problems.py --split test --count 3
"""

import argparse
import hashlib
import random
import re
from dataclasses import dataclass

LARGEST_VALUE = 120  # every number of every problem lies in 1..LARGEST_VALUE, so each is a single token

SHE = (
    "Ada Alma Amy Anna Aria Bella Bianca Cara Carmen Celia Chloe Clara Dana Daisy Diana Edith Elena Ella Emma Erin "
    "Esther Eva Faith Fiona Flora Freya Gina Grace Greta Hanna Hazel Helen Holly Ida Ines Iris Isla Ivy Jana Jane "
    "Jill Joy Judy Julia Karen Kate Lara Laura Lea Lena Lily Lisa Lucy Luna Maria Mary Maya Mia Mila Molly Nadia "
    "Nina Nora Olga Olive Paula Petra Rita Rosa Ruth Sara Sofia Stella Tara Tina Vera Wendy Yara Zoe"
).split()
HE = (
    "Aaron Adam Alan Alex Amir Anton Arthur Ben Boris Bruno Carl Cody Cyrus Daniel David Dylan Edgar Eli Eric Ethan "
    "Felix Finn Frank Fred Gary Gavin Glen Hans Harry Henry Hugo Ian Isaac Ivan Jack Jacob James Jason Joel John "
    "Jonas Karim Kevin Kurt Lars Leo Levi Liam Lucas Marco Mark Martin Max Miles Nathan Neil Noah Oliver Omar Oscar "
    "Otto Owen Paul Peter Ralf Ravi Robin Roman Ryan Sam Scott Simon Theo Tim Tom Victor Walter Yusuf Zack"
).split()
THINGS = (
    "apples badges balloons beads bells books bottles bows boxes bricks brushes buttons cakes candles cards carrots "
    "chairs coins cookies cups dolls eggs feathers figs flags flowers forks gems gloves grapes hats jars kites "
    "lamps leaves lemons letters magnets maps marbles masks melons mugs nuts olives onions oranges peaches pears "
    "pencils pens pins plants plates plums ribbons rings rocks roses ropes scarves seeds shells shirts socks spoons "
    "stamps stickers stones tickets tiles tomatoes toys tulips"
).split()
PLACES = (
    "airport bakery bank barn beach bridge camp castle church cinema farm field forest garden gym harbor hotel "
    "island kitchen lake library market mill museum office palace park pool port river school shop square stable "
    "stadium station studio temple theater tower valley village zoo"
).split()
ACTIVITIES = (
    "cleaning cooking cycling dancing drawing fishing gardening hiking jogging knitting packing painting reading "
    "rowing running sewing singing skating studying swimming training typing walking writing"
).split()


# Each entry is (sentence of the problem, clause of the solution, what the value then is). The clause and the value are
# joined to "<clause>, so <value>."; the last step reads "<clause>, so the answer is". In braces: n the person,
# f another one, he / him their pronouns, k the operand, u the unit, p a place, a an activity, r the result.
HAS = "{he} has {r} {u}"
STARTS = {
    "things": [
        ("{n} has {k} {u}.", "{n} starts with {k} {u}."),
        ("{n} keeps {k} {u} at the {p}.", "At the {p}, {n} starts with {k} {u}."),
        ("There are {k} {u} in the bag of {n}.", "The bag of {n} starts with {k} {u}."),
        ("{n} brings {k} {u} to the {p}.", "{n} comes to the {p} with {k} {u}."),
        ("On Monday {n} collects {k} {u}.", "On Monday {n} starts with {k} {u}."),
        ("{n} is given {k} {u} as a gift.", "The gift is {k} {u} for {n}."),
    ],
    "dollars": [
        ("{n} has {k} dollars.", "{n} starts with {k} dollars."),
        ("{n} saves {k} dollars in a jar.", "The jar of {n} starts with {k} dollars."),
        ("Work at the {p} pays {n} {k} dollars.", "From the {p}, {n} starts with {k} dollars."),
        ("{n} goes to the {p} with {k} dollars.", "{n} comes to the {p} with {k} dollars."),
    ],
    "minutes": [
        ("{n} spends {k} minutes {a}.", "{n} starts with {k} minutes of {a}."),
        ("The way to the {p} takes {n} {k} minutes.", "To the {p} it is {k} minutes for {n}."),
        ("{n} waits {k} minutes at the {p}.", "At the {p}, {n} starts with {k} minutes."),
        ("In the morning {n} is {a} for {k} minutes.", "The morning of {n} starts with {k} minutes of {a}."),
    ],
}
STEPS = {
    ("things", "add"): [
        ("Then {he} finds {k} more at the {p}.", "{He} finds {k} more at the {p}", HAS),
        ("{f} gives {him} {k} more.", "{f} adds {k} more", HAS),
        ("Later {he} buys {k} more {u}.", "Buying {k} more adds to them", HAS),
        ("Another {k} arrive by mail.", "The mail brings {k} more", "there are {r} {u}"),
        ("{He} makes {k} more on Sunday.", "On Sunday {he} adds {k} more", HAS),
        ("At the {p} {he} wins {k} {u}.", "Winning at the {p} adds {k}", HAS),
    ],
    ("things", "take"): [
        ("Then {he} loses {k} of them at the {p}.", "{He} loses {k} at the {p}", "{he} has {r} {u} left"),
        ("{He} gives {k} of them to {f}.", "{f} takes {k} of them", "{he} has {r} {u} left"),
        ("{k} of them break.", "Taking away the {k} broken ones", "there are {r} {u} left"),
        ("{He} leaves {k} of them at the {p}.", "{k} stay behind at the {p}", "{he} has {r} {u} left"),
        ("{He} throws away {k} old ones.", "{k} old ones are thrown away", "{he} has {r} {u} left"),
        ("A dog runs off with {k} of them.", "The dog takes {k} away", "there are {r} {u} left"),
    ],
    ("things", "multiply"): [
        ("By summer {he} has {k} times as many.", "By summer the number grows {k} times", HAS),
        ("{He} works hard to get {k} times as many.", "Hard work makes it {k} times as many", HAS),
        ("A machine turns each one into {k}.", "The machine makes {k} of each one", "there are {r} {u}"),
        ("{f} has {k} times as many {u} as {n}.", "{f} has {k} times as many as {n}", "{f} has {r} {u}"),
        ("{He} cuts each of them into {k} pieces.", "Each one is cut into {k} pieces", "there are {r} {u}"),
    ],
    ("things", "share"): [
        (
            "{He} shares them evenly among {k} friends, and {f} is one of them.",
            "Shared by {k} friends",
            "{f} gets {r} {u}",
        ),
        ("{He} puts them evenly into {k} boxes and takes one box.", "One of {k} equal boxes is taken", HAS),
        ("{k} teams split them evenly, and {f} leads one team.", "Split over {k} teams", "{f} gets {r} {u}"),
        ("{He} sorts them into {k} equal piles and keeps one pile.", "One of {k} equal piles is kept", HAS),
    ],
    ("things", "more"): [
        ("{f} has {k} {u} more than {n}.", "{f} has {k} more than {n}", "{f} has {r} {u}"),
        ("{f} owns {k} more than {n} does.", "{f} owns {k} more than {n}", "{f} has {r} {u}"),
        ("Compared with {n}, {f} has {k} more.", "Compared with {n} it is {k} more", "{f} has {r} {u}"),
    ],
    ("things", "fewer"): [
        ("{f} has {k} {u} fewer than {n}.", "{f} has {k} fewer than {n}", "{f} has {r} {u}"),
        ("{f} owns {k} fewer than {n} does.", "{f} owns {k} fewer than {n}", "{f} has {r} {u}"),
        ("Compared with {n}, {f} has {k} fewer.", "Compared with {n} it is {k} fewer", "{f} has {r} {u}"),
    ],
    ("things", "price"): [
        ("{He} sells all of them for {k} dollars each.", "Each one sells for {k} dollars", "{he} gets {r} dollars"),
        (
            "At the {p} each one costs {k} dollars, and {f} pays for all.",
            "Each costs {k} dollars",
            "{f} pays {r} dollars",
        ),
        (
            "A shop buys them all and pays {k} dollars apiece.",
            "The shop pays {k} dollars apiece",
            "{he} gets {r} dollars",
        ),
        ("Each of them is worth {k} dollars.", "Each is worth {k} dollars", "they are worth {r} dollars"),
    ],
    ("dollars", "add"): [
        ("Then {he} earns {k} dollars at the {p}.", "{He} earns {k} dollars at the {p}", "it is {r} dollars"),
        ("{f} adds {k} dollars.", "{f} puts in {k} dollars", "it is {r} dollars"),
        ("A prize of {k} dollars comes on top.", "The prize adds {k} dollars", "it is {r} dollars"),
        ("{He} finds {k} dollars on the way.", "The {k} dollars on the way come on top", "it is {r} dollars"),
    ],
    ("dollars", "take"): [
        ("{k} dollars of it go to the {p}.", "The {p} takes {k} dollars", "{r} dollars are left"),
        ("{He} spends {k} dollars on lunch.", "Lunch takes {k} dollars", "{r} dollars are left"),
        ("{He} pays {f} {k} dollars from it.", "{f} is paid {k} dollars", "{r} dollars are left"),
        ("A coupon takes off {k} dollars.", "The coupon takes off {k} dollars", "{r} dollars are left"),
    ],
    ("dollars", "share"): [
        ("{k} friends split it evenly, and {f} is one of them.", "Split by {k} friends", "{f} has {r} dollars"),
        (
            "{He} puts it evenly into {k} jars and takes one jar.",
            "One of {k} equal jars is taken",
            "{he} has {r} dollars",
        ),
        ("It is shared evenly by {k} people, {f} among them.", "Shared by {k} people", "{f} has {r} dollars"),
    ],
    ("dollars", "multiply"): [
        ("The bank makes it {k} times as much.", "The bank makes it {k} times as much", "it is {r} dollars"),
        ("{f} has {k} times as much money.", "{f} has {k} times as much", "{f} has {r} dollars"),
    ],
    ("dollars", "change"): [
        (
            "For this amount {he} pays with {k} dollars and waits for the change.",
            "Paid with {k} dollars",
            "the change is {r} dollars",
        ),
        (
            "{f} covers this amount with {k} dollars and gets change.",
            "{f} hands over {k} dollars",
            "the change is {r} dollars",
        ),
        (
            "This sum is taken from a note of {k} dollars.",
            "Taken from a note of {k} dollars",
            "the rest is {r} dollars",
        ),
    ],
    ("minutes", "add"): [
        ("Then {he} goes {a} for {k} more minutes.", "{He} adds {k} minutes of {a}", "it is {r} minutes"),
        ("A break of {k} minutes follows.", "The break adds {k} minutes", "it is {r} minutes"),
        ("A delay at the {p} costs {him} {k} minutes more.", "The delay at the {p} adds {k}", "it is {r} minutes"),
        ("After that {he} talks to {f} for {k} minutes.", "The talk with {f} adds {k} minutes", "it is {r} minutes"),
    ],
    ("minutes", "take"): [
        ("A short cut saves {k} minutes.", "The short cut saves {k} minutes", "{r} minutes remain"),
        ("With help from {f} it takes {k} minutes less.", "The help of {f} saves {k} minutes", "{r} minutes remain"),
        ("{He} skips the last {k} minutes.", "Skipping takes away {k} minutes", "{r} minutes remain"),
    ],
    ("minutes", "multiply"): [
        ("{He} does all of this {k} times.", "All of this happens {k} times", "it is {r} minutes"),
        ("{f} needs {k} times as long.", "{f} needs {k} times as long", "{f} needs {r} minutes"),
        ("In the snow it takes {k} times as long.", "The snow makes it {k} times as long", "it is {r} minutes"),
    ],
    ("minutes", "share"): [
        ("This time is spread evenly over {k} days.", "Spread over {k} days", "each day has {r} minutes"),
        ("{k} helpers split the time evenly, and {f} is one.", "Split by {k} helpers", "{f} needs {r} minutes"),
    ],
    ("minutes", "more"): [
        ("{f} needs {k} minutes more than {n}.", "{f} needs {k} more than {n}", "{f} needs {r} minutes"),
        ("It takes {f} {k} minutes longer than {n}.", "{k} minutes longer than {n}", "{f} needs {r} minutes"),
    ],
    ("minutes", "fewer"): [
        ("{f} needs {k} minutes less than {n}.", "{f} needs {k} less than {n}", "{f} needs {r} minutes"),
        ("{f} is done {k} minutes earlier than {n}.", "{k} minutes earlier than {n}", "{f} needs {r} minutes"),
    ],
}
ENDS = {
    "things": ["How many {u} is that in the end?", "What is the number of {u} now?", "How many {u} does this make?"],
    "dollars": [
        "How many dollars is that in the end?",
        "How much money is that now?",
        "What is the amount in dollars?",
    ],
    "minutes": [
        "How many minutes is that in the end?",
        "What is the time in minutes?",
        "How long is that in minutes?",
    ],
}
OPENINGS = {
    2: "There are two steps to follow, one after the other.",
    3: "We go through three steps, one by one.",
    4: "The story has four steps, so we take them in turn.",
}
ADDING, TAKING = ("add", "more"), ("take", "fewer")
NOTES = (20, 50, 100)


@dataclass(frozen=True)
class Problem:
    """A word problem: `question`, worked `solution` (ends in `#### answer`), `answer`, and its arithmetic `chain`."""

    question: str
    solution: str
    answer: int
    chain: tuple

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.solution}]


def final_number(text: str) -> int | None:
    """The number after the last `####` of a solution, or `None` where there is none. Scoring is exact match of it."""
    found = re.findall(r"####\s*(\d+)", text)
    return int(found[-1]) if found else None


def split_of(chain: tuple) -> str:
    """The split that a chain belongs to: 3 % are test, 3 % validation, the rest train."""
    bucket = int.from_bytes(hashlib.sha256(repr(chain).encode()).digest()[:4], "big") % 100
    return "test" if bucket < 3 else "validation" if bucket < 6 else "train"


def make_problem(split: str, seed: int, index: int) -> Problem:
    """Problem number `index` of `split` for `seed`: the same three values always give the same problem."""
    rng = random.Random(f"{split}-{seed}-{index}")
    while True:
        chain = _draw_chain(rng)
        if chain is not None and split_of(chain) == split:
            return _tell(chain, rng)


def make_problems(split: str, count: int, seed: int = 0) -> list[Problem]:
    """`count` problems of a split, with no chain twice unless the split is "train"."""
    problems, seen, index = [], set(), 0
    while len(problems) < count:
        problem = make_problem(split, seed, index)
        index += 1
        if split == "train" or problem.chain not in seen:
            seen.add(problem.chain)
            problems.append(problem)
    return problems


def _operands(unit: str, operation: str, value: int) -> list[int]:
    """Operands that keep the result of `operation` on `value` a whole number in 2..LARGEST_VALUE."""
    if operation in ADDING:
        return [k for k in range(2, 16) if value + k <= LARGEST_VALUE]
    if operation in TAKING:
        return [k for k in range(2, 16) if value - k >= 2]
    if operation == "multiply":
        return [k for k in range(2, 6) if value * k <= LARGEST_VALUE]
    if operation == "price":
        return [k for k in range(2, 10) if value * k <= LARGEST_VALUE]
    if operation == "share":
        return [k for k in range(2, 7) if value % k == 0 and value // k >= 2]
    return [k for k in NOTES if value + 2 <= k]  # change


def _apply(operation: str, value: int, k: int) -> int:
    if operation in ADDING:
        return value + k
    if operation in TAKING:
        return value - k
    if operation in ("multiply", "price"):
        return value * k
    return value // k if operation == "share" else k - value


def _draw_chain(rng: random.Random) -> tuple | None:
    """(unit, start value, ((operation, operand), ...)), or `None` where the draw ran into a dead end."""
    first_unit = unit = rng.choice(("things", "things", "dollars", "minutes"))
    start = value = rng.randint(4, 60)
    steps: list[tuple[str, int]] = []
    for _ in range(rng.choice((2, 3, 3, 4))):
        possible = {op: ks for u, op in STEPS if u == unit and (ks := _operands(unit, op, value))}
        if steps:
            possible.pop(steps[-1][0], None)
        if not possible:
            return None
        operation = rng.choice(sorted(possible))
        k = rng.choice(possible[operation])
        steps.append((operation, k))
        value = _apply(operation, value, k)
        unit = "dollars" if operation == "price" else unit
    return first_unit, start, tuple(steps)


def _tell(chain: tuple, rng: random.Random) -> Problem:
    """Dresses a chain in words."""
    unit, value, steps = chain
    people = rng.sample([(name, "she", "her") for name in SHE] + [(name, "he", "him") for name in HE], len(steps) + 1)
    thing = rng.choice(THINGS)
    words = {"u": thing if unit == "things" else unit, "k": value}

    def fill(text: str) -> str:
        return text.format(**words)

    def new_scene(person: tuple[str, str, str], friend: str = "") -> None:
        name, he, him = person
        words.update(n=name, he=he, him=him, He=he.capitalize(), f=friend)
        words.update(p=rng.choice(PLACES), a=rng.choice(ACTIVITIES))

    holder = people.pop()
    new_scene(holder)
    told, start = rng.choice(STARTS[unit])
    question, solution = [fill(told)], [OPENINGS[len(steps)], fill(start)]
    for number, (operation, k) in enumerate(steps, start=1):
        value = _apply(operation, value, k)
        friend = people.pop()
        new_scene(holder, friend[0])
        words.update(k=k, r=value)
        told, clause, outcome = rng.choice(STEPS[unit, operation])
        question.append(fill(told))
        if number < len(steps):
            solution.append(fill(f"{clause}, so {outcome}."))
        else:
            solution.append(fill(f"{clause}, so the answer is\n#### {{r}}"))
        if "{f}" in outcome:
            holder = friend
        if operation == "price":
            unit, words["u"] = "dollars", "dollars"
    question.append(fill(rng.choice(ENDS[unit])))
    question_text = " ".join(sentence[0].upper() + sentence[1:] for sentence in question)
    solution_text = " ".join(sentence[0].upper() + sentence[1:] for sentence in solution)
    return Problem(question_text, solution_text, value, chain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--split", choices=("train", "validation", "test"), default="test")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for problem in make_problems(args.split, args.count, args.seed):
        print(f"{problem.question}\n  {problem.solution}\n")


if __name__ == "__main__":
    main()
