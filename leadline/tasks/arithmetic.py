"""Small arithmetic in thinking mode: the working, column by column, and then the answer."""

from random import Random

from leadline.tasks.task import Answer, Dialogue, Measure, Turn


def arithmetic(rng: Random, length: int, turns: int, measure: Measure) -> Dialogue:
    """One sum, difference or product; one turn, since thinking does not stay in the conversation."""
    operation, work = rng.choice((("+", added), ("-", subtracted), ("*", multiplied)))
    digits = rng.choice((1, 2, 2, 3, 3))
    a, b = rng.randrange(10**digits), rng.randrange(10 if operation == "*" else 10**digits)
    if operation == "-":
        a, b = max(a, b), min(a, b)
    result = {"+": a + b, "-": a - b, "*": a * b}[operation]
    turn = Turn(f"What is {a} {operation} {b}? Answer with the number alone.", Answer(str(result), work(a, b)))
    return Dialogue("arithmetic", length, (turn,), thinks=True)


def columns(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of both numbers, the last ones first, as many as the longer number has."""
    count = max(len(str(a)), len(str(b)))
    return [(a // 10**i % 10, b // 10**i % 10) for i in range(count)]


def added(a: int, b: int) -> str:
    """As "7 + 5 = 12. 4 + 8 + 1 = 13. So 132."."""
    steps, carry = [], 0
    for x, y in columns(a, b):
        steps.append(f"{x} + {y}{f' + {carry}' if carry else ''} = {x + y + carry}.")
        carry = (x + y + carry) // 10
    return " ".join([*steps, f"So {a + b}."])


def subtracted(a: int, b: int) -> str:
    """As "15 - 7 = 8. 8 - 4 - 1 = 3. So 38."; a column that borrows begins with ten more."""
    steps, borrowed = [], 0
    for x, y in columns(a, b):
        top = x + 10 * (x < y + borrowed)
        steps.append(f"{top} - {y}{f' - {borrowed}' if borrowed else ''} = {top - y - borrowed}.")
        borrowed = int(top > x)
    return " ".join([*steps, f"So {a - b}."])


def multiplied(a: int, b: int) -> str:
    """`b` has one digit. As "7 * 6 = 42. 4 * 6 + 4 = 28. So 282."."""
    steps, carry = [], 0
    for x, _ in columns(a, 0):
        steps.append(f"{x} * {b}{f' + {carry}' if carry else ''} = {x * b + carry}.")
        carry = (x * b + carry) // 10
    return " ".join([*steps, f"So {a * b}."])
