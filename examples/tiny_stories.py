"""Simple stories with known facts, written by a seeded grammar: the larger part of the tiny model's training text.

Every story carries facts (names, colours, places, numbers) that are told early and needed late, and questions
about them whose answers are known. So a model that has learned these stories can be asked something that only
its memory of the whole text can answer, and a wrong cache shows as a wrong answer.

Templates: `[a|b]` picks one of the alternatives (they may nest), `{hero}` inserts a fact.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Story:
    """`text`: the story. `about`: one sentence that sums it up. `questions`: (question, answer) pairs."""

    text: str
    about: str
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Plot:
    """The middle of a story: `beats` in order, each with alternatives, and what can be asked about it.

    Every beat starts where a sentence may start, but the first one, which follows "One day,".
    """

    about: str
    lesson: str
    beats: Sequence[str]
    questions: Sequence[tuple[str, str]]


def pool(alternatives: str) -> list[str]:
    """The alternatives between the bars."""
    return alternatives.split("|")


GIRLS = pool("Anna|Lily|Mia|Rosa|Ella|Nora|Clara|Ida|Emma|Lucy|Greta|Maya|Ruth|Tilda|Wren|Hazel|Ivy|June|Dora|Mabel")
BOYS = pool("Tom|Ben|Max|Leo|Finn|Oscar|Hugo|Sam|Peter|Jack|Otto|Theo|Henry|Felix|Karl|Noah|Emil|Robin|Gus|Arlo")
CREATURES = pool(
    "fox|rabbit|bear|mouse|hedgehog|squirrel|badger|otter|beaver|goat|duck|hen|goose|frog|cat|dog|pony|lamb|owl|crow"
)
CHILDREN = {
    "girl": "she",
    "princess": "she",
    "boy": "he",
    "prince": "he",
    "shepherd boy": "he",
    "farmer's daughter": "she",
}
SYLLABLES = pool("ba|bo|da|do|fa|fi|ka|ki|ko|la|li|lo|ma|mi|mo|na|no|pa|pi|ra|ri|ro|sa|so|ta|ti|to|va|vi|wo|za|zu")
COLOURS = pool("red|blue|green|yellow|white|black|golden|silver|purple|orange|brown|pink")
THINGS = pool(
    "kite|ball|hat|scarf|lantern|boat|drum|whistle|ribbon|basket|bell|button|kettle|blanket|cup|book|key|ring|"
    "coat|umbrella|spoon|doll|flute|map"
)
FOODS = pool("bread|apples|cheese|honey|soup|pancakes|berries|plums|cake|porridge|nuts|pears|pie|cherries")
NUMBERS = pool("two|three|four|five|six|seven|eight|nine|ten|eleven|twelve")
HOMES = pool(
    "in a small village by the sea|in a little house at the edge of a forest|in an old mill by a river|in a cottage on a green hill|"
    "in a town with a tall clock tower|on a farm with a white gate|in a cosy hole under an oak tree|in a stone house in the mountains|"
    "in a hut beside a quiet lake|in a castle with seven towers|in a lighthouse on a rock|in a valley full of flowers"
)
SPOTS = pool(
    "under the old bridge|behind the barn|at the top of a tall pine|inside a hollow log|in the baker's cart|"
    "at the bottom of the well|beside the frozen pond|among the roses|in a crow's nest|under the church steps|"
    "in the tall grass by the road|on the roof of the mill|in a cave by the waterfall|behind a pile of hay"
)
SEARCHED = pool(
    "in the garden|in the kitchen|on the meadow|at the market|in the orchard|in the attic|in the stable|on the beach|"
    "at the school|in the cellar"
)
TRAITS = pool("kind|brave|clever|shy|curious|cheerful|lonely|proud|gentle|lazy|quick|quiet|stubborn|merry|careful")
FEARS = pool("the dark|thunder|deep water|the tall stairs|big dogs|the old well|flying|strangers")
GUESTS = pool(
    "a tired beggar|an old woman with a stick|a lost traveller|a wet kitten|a hungry wolf|a pedlar with a cart"
)
SEASONS = pool("spring|summer|autumn|winter")
PRIZES = pool("apples|plums|pears|cherries|cakes|pies")
CRIES = ("a cry", "a weak voice", "a strange sound")

OPENINGS = (
    "Once upon a time, there [lived|was] {a_hero} [named|called] {hero}. {He} lived {home}.",
    "Once upon a time, {home}, there lived {a_hero}. {His} name was {hero}.",
    "Long ago, {a_hero} called {hero} lived {home}.",
    "There was once {a_hero} whose name was {hero}. {He} lived {home}, [far from any city|and {he} was happy there].",
    "{Home} lived {a_hero} named {hero}.",
)
DETAILS = (
    "{hero} was very {trait}, and [everyone knew it|{his} mother often said so|nobody minded].",
    "[Every morning|Every evening] {he} ate {food} and [looked out of the window|sang a little song|sat by the door].",
    "{His} best friend was {a_friend} named {friend}.[ They did everything together.| They met every day.|]",
    (
        "More than anything {hero} loved {his} {colour} {thing}. [It had belonged to {his} grandmother.|{He} had made it {himself}.|"
        "It had come in a box with {number} stamps.]"
    ),
)
TURNS = (
    "One [fine|cold|bright|windy|grey] {season} [day|morning|afternoon],",
    "One day, when {season} had come,",
    "Then, early one {season} morning,",
)
ASIDES = (
    "[The wind sang in the trees.|The sun was shining.|It began to rain.|The birds were quiet.|Far away a bell rang.]",
    "[They stopped to eat some {food}.|{hero} was hungry, so {he} ate a little {food}.]",
    (
        '"[Do not give up|Be patient|Wait and see|Let us try again]," said {friend}[ softly| with a smile|]. '
        '[{hero} nodded.|"I will," said {hero}.|"You are right," said {hero}.]'
    ),
    "{He} counted [slowly |]to {number} and [felt better|took a deep breath|went on].",
    "[A {creature} watched them from behind a tree.|A {creature} ran across the path.]",
)
ENDINGS = (
    "From that day on, {hero} and {friend} were [the best of friends|never apart|happy together].",
    "And [they all|{hero} and {friend}] lived happily ever after.",
    "That night {hero} [slept soundly|fell asleep with a smile], and {his} {colour} {thing} lay beside {him}.",
    "[And so {hero} learned|From then on {hero} knew] that {lesson}.",
    "When {hero} was old, {he} still told the story of [that day|the {colour} {thing}] to all the children.",
)
PLOTS = (
    Plot(
        "{hero} loses the {colour} {thing} and finds it {spot}",
        "[asking for help is no shame|a true friend is worth more than gold]",
        (
            "{hero} [woke up and|came home and|opened the old chest and] saw that the {colour} {thing} was gone.",
            '"[Oh no|Oh dear|Alas]!" cried {hero}. "[Where is my {thing}?|Who has taken my {thing}?|I have lost my {thing}!]"',
            "{He} looked {searched}, but [it was not there|there was nothing but dust|{he} found only {number} old shoes].",
            "Then {he} ran to {friend} {the_friend} and [asked for help|told {fhim} everything|began to cry].",
            '"[Do not cry|Do not worry|Dry your eyes]," said {friend}. "We will look for it together."',
            (
                "[They looked and looked.|They walked all day.|They asked everyone they met.] At last {friend} [pointed|shouted|stopped] and said, "
                '"[Look there|I see something {colour}|Is that it]!"'
            ),
            "The {thing} was {spot}. [The wind had carried it there.|A {creature} had hidden it there.|It had fallen there in the night.]",
            '[{hero} laughed for joy|{hero} jumped up and down|{hero} hugged {friend}] and said, "Thank you, {friend}!"',
        ),
        (
            ("Where was the {thing}?", "It was {spot}."),
            ("Who helped {hero}?", "{friend} helped {him}."),
            ("What did {hero} lose?", "{He} lost {his} {colour} {thing}."),
        ),
    ),
    Plot(
        "{hero} helps {guest} and is rewarded",
        "[kindness always comes back|a kind deed is never lost]",
        (
            "{hero} met {guest} [on the road|at the gate|in the snow|by the river].",
            '"[Please|I beg you]," said the stranger, "[I have not eaten for {number} days|I am cold and hungry|I have lost my way]."',
            (
                "[Others had passed by without a word, but|{friend} wanted to run away, but|Although {he} had little {himself},] {hero} "
                "gave the stranger some {food} and {his} {colour} {thing}."
            ),
            '"[You have a good heart|You will not be sorry|I shall not forget this]," said the stranger, and went away.',
            "[{number_} days later|Many weeks later|The next {season}], a [terrible storm|great flood|hard frost] came, and {hero} was [in danger|lost {spot}|all alone].",
            "Who came [then|through the rain|at that moment]? It was {guest}, [holding the {colour} {thing}|with a warm cloak|riding on a great {creature}].",
            '"[You helped me once|I remember you], {hero}," [came the answer|said the stranger]. "[Now I will help you|Now it is my turn]."',
            "And they brought {hero} safely home, where {friend} {the_friend} was waiting [with hot {food}|by the fire|at the window].",
        ),
        (
            ("Whom did {hero} help?", "{He} helped {guest}."),
            ("What did {hero} give away?", "{He} gave away some {food} and {his} {colour} {thing}."),
            ("Who was waiting at home?", "{friend} was waiting."),
        ),
    ),
    Plot(
        "{hero} and {friend} quarrel about the {colour} {thing} and learn to share",
        "[it is good to share|a friend is worth more than a {thing}]",
        (
            "{friend} {the_friend} came to [play|visit|stay]. {fHe} saw the {colour} {thing} and wanted it.",
            '"[Give it to me|Let me have it|May I hold it]!" said {friend}. "No," said {hero}, "[it is mine|you will break it|I had it first]!"',
            "They pulled [this way and that way|with all their might|until their hands hurt], and [crack|snap|rip]! The {thing} broke into {number} pieces.",
            "[Both of them were silent.|Both of them began to cry.|Neither of them spoke for a long time.]",
            "{hero} sat [alone|sadly] {spot}, and {friend} sat {searched}. [Neither was happy.|How long the day was!]",
            'At last {hero} went to {friend} and said, "[I am sorry|Forgive me|I was wrong]. [We can mend it together|Let us make a new one]."',
            "They worked [until evening|for {number} hours|side by side], with [glue|string|a needle and thread], and the {thing} was [as good as new|even better than before].",
            "[Now|After that] {hero} had it on one day and {friend} on the next, and [that was fair|nobody quarrelled|they were glad].",
        ),
        (
            ("What did they quarrel about?", "They quarrelled about the {colour} {thing}."),
            ("How many pieces were there?", "There were {number} pieces."),
            ("Where did {hero} sit?", "{He} sat {spot}."),
        ),
    ),
    Plot(
        "{hero} carries {food} to {his} grandmother and crosses a river",
        "[there is always a way across|two can do what one cannot]",
        (
            '{his} mother said, "{hero}, take this {food} to your grandmother. She is ill. [Do not stop on the way|Be home before dark]."',
            "{hero} put the {food} into a basket, took {his} {colour} {thing}, and set out. [It was a long way.|{He} sang as {he} walked.]",
            "Soon {he} came to a river, but the bridge was [broken|gone|under water]. [What could {he} do?|{He} sat down and thought.]",
            'There {he} met {friend} {the_friend}. "[I know a way|I can help you|Follow me]," said {friend}.',
            "{friend} [showed {him} {number} flat stones in the water|pushed a log across the river|tied the {colour} {thing} to a rope and pulled {him} over].",
            "On the other side they met a {creature}, who [asked for some {food}|wanted to know the way|was very rude], but they [went on|were polite|did not stop].",
            "At last they came to the grandmother's house, {spot}. She was [so glad that she sat up in bed|well again as soon as she saw them].",
            "They ate the {food} together, and {hero} told her about [the river|{friend}|all they had seen].",
        ),
        (
            ("What did {hero} carry?", "{He} carried {food}."),
            ("Whom did {hero} meet at the river?", "{He} met {friend} {the_friend}."),
            ("Where was the grandmother's house?", "It was {spot}."),
        ),
    ),
    Plot(
        "{hero} is afraid of {fear} and becomes brave",
        "[even the smallest can be brave|one may be afraid and still be brave]",
        (
            "there was something wrong: {hero} was afraid of {fear}. [Nobody knew it.|The others laughed at {him}.|{He} told no one.]",
            '{friend} {the_friend} [saw {him} trembling|heard {him} crying|noticed it] and asked, "What is the matter, {hero}?"',
            '"I am afraid of {fear}," whispered {hero}. "[So was I once|Everyone is afraid of something|That is nothing to be ashamed of]," said {friend}.',
            '{friend} gave {him} {a_tint} {gift}. "[Hold it tight|Keep it close|Look at it], and count to {number}, and you will be brave."',
            "That very [night|day], {a_cry} [was heard|came] from outside. A little {creature} was [stuck|in trouble|lost] {spot}.",
            "{hero} thought of {fear}, and {his} knees shook. But {he} held the {tint} {gift}, counted to {number}, and went.",
            "{He} [pulled the {creature} out|carried the {creature} home|brought the {creature} back to its mother], and [only then|afterwards] {he} saw that {he} had not been afraid at all.",
            '"[It was not the {gift}|There is no magic in the {gift}]," said {friend}. "It was you."',
        ),
        (
            ("What was {hero} afraid of?", "{He} was afraid of {fear}."),
            ("What did {friend} give {hero}?", "{fHe} gave {him} {a_tint} {gift}."),
            ("Whom did {hero} save?", "{He} saved a little {creature}."),
        ),
    ),
    Plot(
        "{hero} gets {number} wishes from a {creature}",
        "[one should be content with little|gold cannot buy happiness]",
        (
            "{hero} found a {creature} in a trap {spot}. {He} set it free.",
            '"[Thank you|You are good]," said the {creature}. "I am [no common {creature}|under a spell|a fairy]. You may have {number} wishes."',
            "{hero} wished for [a house full of {food}|a mountain of {food}|{food} every day], and at once it was there. {He} ate until {he} was [ill|sleepy].",
            "Then {he} wished for [gold|a crown|a hundred servants], but [it made {him} no happier|everyone was jealous|{he} could not sleep].",
            '{friend} {the_friend} [shook {fhis} head|sighed] and said, "[You have everything and you are sad|You were happier before]."',
            'So {hero} [thought for a long time|went back to the {creature}] and said, "For my last wish, let everything be as it was."',
            "And everything was as before: the house, the {colour} {thing}, and {friend}.",
            '[{hero} had never been so happy.|{hero} danced for joy.|"I have all I need," said {hero}.]',
        ),
        (
            ("Who gave {hero} the wishes?", "A {creature} gave them to {him}."),
            ("How many wishes were there?", "There were {number} wishes."),
            ("Where was the {creature}?", "It was {spot}."),
        ),
    ),
    Plot(
        "{hero} enters a contest with the {colour} {thing} and {friend} wins",
        "[it is no shame to lose|a good loser is a good friend]",
        (
            "a [great|merry] contest was held {searched}. [The king himself came|People came from far and near], and the prize was a basket with {number} {prize}.",
            "{hero} took {his} {colour} {thing} and practised [every day|from morning till night|until {he} was tired].",
            '"I shall surely win," said {hero}. {friend} {the_friend} said nothing, but {fhe} practised too.',
            "On the day of the contest, [everyone was there|the drums were beating|flags waved from every roof]. First came a {creature}, who [fell down|forgot everything|made them laugh].",
            "Then {hero} had {his} turn. [{He} did well|{He} did {his} best], but {he} [slipped|stumbled] at the end.",
            "Last of all came {friend}. {fHe} made no mistake, and {fhe} won the basket with {number} {prize}.",
            '{hero} [was angry at first|felt hot with shame|bit {his} lip], but then {he} [shook {fhis} hand|embraced {friend}] and said, "[Well done|You were better], {friend}!"',
            '"[We shall share it|Half of it is yours]," said {friend}, and they sat down {spot} and shared the {prize}.',
        ),
        (
            ("Who won the contest?", "{friend} won the contest."),
            ("What was the prize?", "It was a basket with {number} {prize}."),
            ("Where was the contest held?", "It was held {searched}."),
        ),
    ),
    Plot(
        "{hero} plants {number} seeds {spot}",
        "[patience brings good things|one should never give up]",
        (
            '{hero} found {number} seeds in the pocket of an old coat. ["What may they be?" {he} wondered.|They were as small as grains of sand.]',
            "{He} planted them {spot} and gave them water [every morning|every evening] from {a_tint} jug.",
            '{friend} {the_friend} laughed. "[Nothing will grow there|You are wasting your time|Seeds are for eating]," {fhe} said.',
            "A week went by, and [nothing happened|the earth stayed bare]. [A {creature} came and dug up one of them.|The snow came.|The sun burned.] But {hero} did not give up.",
            "Then one day [a tiny green leaf|a small shoot] looked out of the earth. [It grew and grew|Soon it was as tall as {hero}|It grew higher than the roof].",
            "In autumn it was full of {food}. [There was enough for everyone|{hero} filled {number} baskets], and {hero} called all the neighbours.",
            'Even {friend} came, [with a red face|a little ashamed], and said, "[I was wrong|Forgive me for laughing], {hero}."',
            '"[Sit down and eat|There is plenty for all]," said {hero}, and {fhe} ate [three plates of {food}|until the moon rose].',
        ),
        (
            ("How many seeds were there?", "There were {number} seeds."),
            ("Where did {hero} plant the seeds?", "{He} planted them {spot}."),
            ("Who laughed?", "{friend} laughed."),
        ),
    ),
    Plot(
        "{hero} tells a lie about the {tint} {gift} and then the truth",
        "[it is best to tell the truth|a lie grows heavier every day]",
        (
            "{hero} was playing {searched} and broke {a_tint} {gift} that [belonged to {friend}|was not {hiss}].",
            "[{He} was frightened.|{His} heart beat fast.] {He} hid the pieces {spot} and [ran home|told no one].",
            '{friend} {the_friend} came and asked, "Have you seen my {gift}?" "No," said {hero}, "[perhaps the {creature} took it|I have seen nothing|ask the {creature}]."',
            "So they [shut the {creature} in the shed|sent the {creature} away|were angry with the {creature}], and the {creature} [wept|hung its head].",
            "That night {hero} [could not sleep|lay awake|heard the clock strike {number}]. {He} thought of the poor {creature}.",
            'In the morning {he} went to {friend} and said, "It was I who broke the {gift}. [I am sorry|I was afraid to tell you]."',
            '{friend} [was silent for a while|looked at {him} for a long time]. Then {fhe} said, "[It was brave to tell the truth|A {gift} can be mended, but a lie cannot]."',
            "They let the {creature} go, gave it some {food}, and [begged its pardon|stroked its head].",
        ),
        (
            ("Who broke the {gift}?", "{hero} broke it."),
            ("Where were the pieces?", "They were {spot}."),
            ("Who was blamed?", "The {creature} was blamed."),
        ),
    ),
)

ASKS = (
    "Tell me a story about {a_hero_plain} [named|called] {hero}.",
    "[Please tell|Tell] me a story about {hero} {the_hero} and {a_colour} {thing}.",
    "Write a [short |]story about {a_hero_plain} and {a_friend_plain}.",
    "Can you tell me a story about {a_hero_plain}?",
    "I would like a story about {a_colour} {thing}.",
    "Tell me a [bedtime |]story.",
)
COMMON_QUESTIONS = (
    ("What was the name of the {kind}?", "{His} name was {hero}."),
    ("Who was {hero}?", "{hero} was {a_hero}."),
    ("Where did {hero} live?", "{He} lived {home}."),
    ("Who was {friend}?", "{friend} was {a_friend}."),
    ("What colour was the {thing}?", "It was {colour}."),
)


def a(words: str) -> str:
    """`words` with its indefinite article."""
    return ("an " if words[0] in "aeiou" else "a ") + words


def invented_name(rng: Random) -> str:
    """A name of two or three random syllables, which no list holds: it can only be remembered."""
    return "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()


def expand(template: str, facts: dict[str, str], rng: Random) -> str:
    """`template` with its choices made and its facts inserted; sentences begin with a capital."""
    while CHOICE.search(template):
        template = CHOICE.sub(lambda found: rng.choice(found[1].split("|")), template)
    return template.format_map(facts)


def draw_character(rng: Random, prefix: str, taken: str) -> dict[str, str]:
    """Facts about one character: `prefix` is "" for the hero (name under "hero") or "f" for the friend."""
    kind = rng.choice(CREATURES) if rng.random() < 0.6 or prefix else rng.choice(list(CHILDREN))
    he = CHILDREN.get(kind) or rng.choice(("he", "she"))
    names = [name for name in (GIRLS if he == "she" else BOYS) if name != taken]
    name = invented_name(rng) if rng.random() < 0.35 else rng.choice(names)
    him, his, hiss = ("her", "her", "hers") if he == "she" else ("him", "his", "his")
    role = "friend" if prefix else "hero"
    size = rng.choice(("little", "young", "small") if not prefix else ("old", "wise", "young", "big"))
    return {
        role: name,
        f"a_{role}": a(f"{size} {kind}"),
        f"a_{role}_plain": a(kind),
        f"the_{role}": f"the {kind}",
        prefix + "kind": kind,
        prefix + "he": he,
        prefix + "He": he.capitalize(),
        prefix + "him": him,
        prefix + "his": his,
        prefix + "His": his.capitalize(),
        prefix + "hiss": hiss,
        prefix + "himself": him + "self",
    }


def draw_facts(rng: Random) -> dict[str, str]:
    """Everything that the templates of one story may mention."""
    facts = draw_character(rng, "", "")
    facts |= draw_character(rng, "f", facts["hero"])
    pools: dict[str, Sequence[str]] = {
        "food": FOODS,
        "number": NUMBERS,
        "home": HOMES,
        "spot": SPOTS,
        "searched": SEARCHED,
    }
    pools |= {"trait": TRAITS, "fear": FEARS, "guest": GUESTS, "season": SEASONS, "prize": PRIZES, "a_cry": CRIES}
    facts |= {name: rng.choice(pool) for name, pool in pools.items()}
    facts["colour"], facts["tint"] = rng.sample(COLOURS, 2)
    facts["thing"], facts["gift"] = rng.sample(THINGS, 2)
    others = [kind for kind in CREATURES if kind not in (facts["kind"], facts["fkind"]) and kind[0] not in "aeiou"]
    facts["creature"] = rng.choice(others)
    facts |= {"a_colour": a(facts["colour"]), "a_tint": a(facts["tint"]), "Home": facts["home"].capitalize()}
    facts["number_"] = facts["number"].capitalize()
    return facts


def write_story(rng: Random) -> tuple[Story, dict[str, str]]:
    """One story of about 160 to 260 words, and its facts."""
    facts, plot = draw_facts(rng), rng.choice(PLOTS)
    facts["lesson"] = expand(plot.lesson, facts, rng)

    def say(*templates: str) -> str:
        return " ".join(expand(template, facts, rng) for template in templates)

    middle = list(plot.beats)
    for place in sorted(rng.sample(range(2, len(middle)), rng.choice((0, 1, 2))), reverse=True):
        middle.insert(place, rng.choice(ASIDES))
    half = len(middle) // 2
    endings = sorted(rng.sample(ENDINGS, rng.choice((1, 2))), key=ENDINGS.index)
    paragraphs = [
        say(rng.choice(OPENINGS), *rng.sample(DETAILS, len(DETAILS))),
        say(rng.choice(TURNS), *middle[:half]),
        say(*middle[half:]),
        say(*endings),
    ]
    questions = [(say(question), say(answer)) for question, answer in (*COMMON_QUESTIONS, *plot.questions)]
    rng.shuffle(questions)
    return Story("\n\n".join(paragraphs), say(plot.about), tuple(questions)), facts


def write_register(rng: Random) -> Story:
    """A list of villagers with one fact or two each, and questions in both directions: pure recall."""
    count = rng.randint(4, 16)
    names: list[str] = []
    while len(names) < count:
        name = invented_name(rng) if rng.random() < 0.7 else rng.choice(GIRLS + BOYS)
        if name not in names:
            names.append(name)
    keeps = rng.sample(
        [f"{number} {creature}s" for number in NUMBERS for creature in ("goat", "duck", "hen", "cat", "frog", "owl")],
        count,
    )
    houses = rng.sample([f"{size} {colour}" for size in ("small", "large") for colour in COLOURS], count)
    likes = rng.choices(FOODS, k=count)
    lines, questions = [], []
    for name, keep, house, food in zip(names, keeps, houses, likes, strict=True):
        lines.append(f"{name} lives in the {house} house, keeps {keep} and likes {food}.")
        questions += [
            (f"What does {name} keep?", f"{name} keeps {keep}."),
            (f"Who keeps {keep}?", f"{name} keeps {keep}."),
            (f"Which house does {name} live in?", f"{name} lives in the {house} house."),
            (f"Who lives in the {house} house?", f"{name} lives in the {house} house."),
            (f"What does {name} like?", f"{name} likes {food}."),
        ]
    return Story(" ".join(lines), "the people of a village", tuple(rng.sample(questions, min(len(questions), 10))))


def write_sums(rng: Random) -> tuple[tuple[str, str], ...]:
    """Sums and differences of numbers below 100 with their results."""
    pairs = []
    for _ in range(rng.randint(4, 12)):
        top = rng.choice((10, 20, 100))
        x, y = rng.randrange(top), rng.randrange(top)
        if rng.random() < 0.5:
            pairs.append((f"What is {x} + {y}?", f"{x} + {y} = {x + y}"))
        else:
            pairs.append((f"What is {max(x, y)} - {min(x, y)}?", f"{max(x, y)} - {min(x, y)} = {abs(x - y)}"))
    return tuple(pairs)
