"""The web pages: what is sent with them, and what they do in a browser (headless Chromium, where there is one)."""

import asyncio
import json
import random
import re
import shutil
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from servers import Live, ScriptedEngine, live_server, served_model, serving

from leadline.engine.async_engine import EngineStopped
from leadline.engine.engine import Stats
from leadline.server.pages import FOLDER, HEADERS

END_THINK, EOS = 6, 1
MOST_BYTES = 40_000
CALL = (
    'Ok.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="where" string="true">'
    "<b>here</b></｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
HOSTILE = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'> &lt; javascript:1"


@dataclass
class HeldEngine(ScriptedEngine):
    """Says the first `hold` tokens, then waits until `held` is None or it is left. Has counts that move."""

    hold: int | None = None
    left: int = 0
    asked: int = 0
    counts: list[list[int]] = field(default_factory=lambda: [[0, 0, 0], [0, 0, 0]])
    stopped: bool = False

    async def generate(self, *arguments: Any, **named: Any) -> AsyncGenerator[Any, None]:
        said = 0
        try:
            async for update in super().generate(*arguments, **named):
                while self.hold is not None and said >= self.hold:
                    await asyncio.sleep(0.01)
                yield update
                said += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise

    async def stats(self) -> Stats:
        if self.stopped:
            raise EngineStopped("the engine's process was killed by signal 9 (Killed)")
        self.asked += 1
        n = self.asked
        return Stats(100 * n, 0, 50 * n, 10 * n, n, 3, 2, 200, 60, 20, 8, 4, 0.2 * n)

    async def expert_load(self) -> list[list[int]]:
        self.counts = [[a + 1 + 3 * layer * e for e, a in enumerate(row)] for layer, row in enumerate(self.counts)]
        return self.counts


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(HeldEngine([[EOS]]), served_model()) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    """Each test begins with an engine that says nothing of the last one."""
    if "live" in request.fixturenames:
        engine = request.getfixturevalue("live").engine
        engine.script, engine.hold, engine.error, engine.reason, engine.stopped = [[EOS]], None, None, "stop", False
        engine.prompts.clear()
        engine.params.clear()


def script(live: Live, content: str, thinking: str | None = None, hold: int | None = None) -> int:
    """Let the engine say this in steps of one token, waiting after `hold` of them; how many tokens it is."""
    encode = live.model.chat_format().tokenizer.encode
    tokens = [] if thinking is None else [*encode(thinking), END_THINK]
    tokens += [*encode(content), EOS]
    live.engine.script, live.engine.hold = [[token] for token in tokens], hold
    return len(tokens)


# ------------------------------------------------------------------------------------------- without a browser


def test_pages_come_with_a_policy_that_allows_only_our_own_files(live: Live) -> None:
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    paths = ["/", "/status", *(f"/pages/{path.name}" for path in FOLDER.iterdir())]
    for path in paths:
        response = live.http.get(path)
        assert response.status_code == 200, path
        kind = "html" if path in ("/", "/status") else path.rpartition(".")[2]
        assert response.headers["content-type"] == f"{kinds[kind]}; charset=utf-8"
        assert {name: response.headers[name] for name in HEADERS} == HEADERS
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert HEADERS["X-Content-Type-Options"] == "nosniff"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)


def test_pages_refer_to_nothing_that_is_not_served_here(live: Live) -> None:
    for path in sorted(FOLDER.iterdir()):
        text = path.read_text()
        for link in re.findall(r"""(?:src|href|from|fetch)\s*[=(]?\s*["']([^"'#]+)["']""", text):
            assert link.startswith("/"), (path.name, link)
            assert live.http.get(link).status_code in (200, 405), (path.name, link)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
        if path.suffix == ".html":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text), path.name


def test_pages_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MOST_BYTES


@pytest.mark.parametrize("name", ["nothing.js", "..%2fpages.py", "..%2f..%2fconfig.py", "%2fetc%2fpasswd", ""])
def test_only_the_pages_are_served(live: Live, name: str) -> None:
    response = live.http.get(f"/pages/{name}")
    assert (response.status_code, response.json()["type"]) == (404, "error")


def test_numbers_are_the_engine_s(live: Live) -> None:
    before, after = (live.http.get("/status/numbers").json() for _ in range(2))
    assert after["engine"]["tokens_run"] - before["engine"]["tokens_run"] == 100
    assert after["seconds"] > before["seconds"]
    assert (after["engine"]["running"], after["engine"]["waiting"], after["problem"]) == (3, 2, None)
    live.engine.cached = 5
    script(live, "yes", "hm")
    live.http.post("/v1/completions", json={"prompt": list(range(2, 12)), "max_tokens": 9})
    now = live.http.get("/status/numbers").json()
    live.engine.cached = 0
    assert now["cached_tokens"] - after["cached_tokens"] == 5
    assert now["prompt_tokens"] - after["prompt_tokens"] == 10
    live.engine.stopped = True
    down = live.http.get("/status/numbers").json()
    assert (down["engine"], down["problem"]) == (None, "the engine's process was killed by signal 9 (Killed)")


def test_numbers_and_experts_of_the_built_in_model() -> None:
    with live_server() as live:
        active, layers = live.model.config.num_experts_per_tok, live.model.config.num_hidden_layers
        begun = live.http.get("/status/numbers").json()["engine"]
        assert sum(map(sum, live.http.get("/status/experts").json()["counts"])) == 0
        live.http.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 5})
        ended = live.http.get("/status/numbers").json()["engine"]
        counts = live.http.get("/status/experts").json()["counts"]
    run = ended["tokens_run"] - begun["tokens_run"]
    assert run >= 5
    assert [sum(row) for row in counts] == [active * run] * layers
    assert ended["busy_seconds"] > begun["busy_seconds"]


def test_pages_are_open_where_requests_need_a_key() -> None:
    with serving(HeldEngine([[EOS]]), served_model(), keys=["secret"]) as live:
        for path in ("/", "/status", "/pages/chat.js", "/status/numbers"):
            assert live.http.get(path).status_code == 200
        assert live.http.get("/v1/models").status_code == 401


# ------------------------------------------------------------------------------------------------ in a browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found:
        pytest.skip("needs a browser: apt-get install chromium")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield opened
        opened.close()


@dataclass
class Tab:
    """A page with what went wrong in it: the messages of its console, and where it sent requests."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def opened(browser: Any, url: str, path: str = "/", allowed: str = "(?!)", **options: Any) -> Iterator[Any]:
    """A tab; at its end, no request has gone elsewhere, and nothing but what is `allowed` was wrong."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(10_000)
    page = context.new_page()
    tab = Tab(page)
    page.on("console", lambda message: tab.messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: tab.messages.append(f"error: {error}"))
    page.on("request", lambda request: tab.requests.append(request.url))
    page.goto(url + path)
    try:
        yield page
    finally:
        context.close()
    assert {urlsplit(sent).netloc for sent in tab.requests} == {urlsplit(url).netloc}
    wrong = [text for text in tab.messages if not text.startswith("verbose") and not re.search(allowed, text)]
    assert not wrong, wrong


def say(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def done(page: Any) -> None:
    page.wait_for_selector("#stop", state="hidden")


def prompt(live: Live) -> str:
    """What the engine was last asked."""
    return live.model.text(live.engine.prompts[-1], skip_special=False)


def eventually(page: Any, true: Any) -> None:
    for _ in range(200):
        if true():
            return
        page.wait_for_timeout(20)
    raise AssertionError("it did not come true within 4 s")


def test_an_answer_streams_and_the_conversation_goes_on(browser: Any, live: Live) -> None:
    with opened(browser, live.url) as page:
        script(live, "Forty two, 😀 龘.", hold=3)
        page.uncheck("#thinking")
        page.fill("#system", "Be brief.")
        page.fill("#temperature", "0.5")
        page.fill("#max-tokens", "77")
        say(page, "What is it?")
        eventually(page, lambda: 0 < len(page.inner_text(".answer")) < len("Forty two, 😀 龘."))
        assert page.get_attribute("#log", "aria-busy") == "true"
        assert page.inner_text("#state") == "Answering"
        live.engine.hold = None
        done(page)
        assert page.inner_text(".answer") == "Forty two, 😀 龘."
        assert page.get_attribute("#log", "aria-busy") == "false"
        assert re.match(r"Tokens: \d+ read, \d+ written, [\d.]+ a second\.", page.inner_text(".note"))
        assert (live.engine.params[-1].temperature, live.engine.params[-1].max_tokens) == (0.5, 77)
        assert "Be brief." in prompt(live) and prompt(live).endswith("</think>")
        say(page, "Why?")
        page.wait_for_selector(".turn.assistant >> nth=1")
        done(page)
        assert re.search(r"What is it\?.*Forty two, 😀 龘\..*Why\?", prompt(live), re.S)
        page.click("#new")
        assert page.inner_text("#log") == ""
        say(page, "Again")
        done(page)
        assert "Why?" not in prompt(live) and "Be brief." in prompt(live)


def test_thinking_stands_apart_and_folds_when_the_answer_begins(browser: Any, live: Live) -> None:
    with opened(browser, live.url) as page:
        thinking, content = "First this, then that.", "So it is."
        count = script(live, content, thinking, hold=4)
        say(page, "hm?")
        page.wait_for_selector(".thinking[open]")
        eventually(page, lambda: page.inner_text(".thinking .text") != "")
        assert page.inner_text(".answer") == ""
        live.engine.hold = count
        done(page)
        assert page.text_content(".thinking .text") == thinking
        assert page.inner_text(".answer") == content
        assert page.get_attribute(".thinking", "open") is None
        assert re.fullmatch(r"Thought for [\d.]+ s", page.inner_text(".thinking summary"))
        assert prompt(live).endswith("<think>")
        page.click(".thinking summary")
        assert page.is_visible(".thinking .text")


@pytest.mark.parametrize("how", ["escape", "button", "new chat"])
def test_stopping_ends_the_request_on_the_server(browser: Any, live: Live, how: str) -> None:
    with opened(browser, live.url) as page, ThreadPoolExecutor(1) as thread:
        page.uncheck("#thinking")
        left = live.engine.left
        script(live, "a long story that never ends", hold=4)
        say(page, "Tell")
        eventually(page, lambda: page.inner_text(".answer") != "")
        part = page.inner_text(".answer")
        assert live.requests._running
        if how == "escape":
            page.keyboard.press("Escape")
        else:
            page.click("#stop" if how == "button" else "#new")
        eventually(page, lambda: live.engine.left == left + 1)
        eventually(page, lambda: not live.requests._running)
        done(page)
        live.engine.hold = None
        assert page.evaluate("document.activeElement.id") == "question"
        if how != "new chat":
            assert page.inner_text(".note") == "Stopped."
        say(page, "Go on")
        eventually(page, lambda: len(live.engine.prompts) > 0 and "Go on" in prompt(live))
        done(page)
        assert (f"{part.strip()}" in prompt(live)) == (how != "new chat")
        assert thread.submit(lambda: live.requests._running == {}).result()


def test_what_the_model_says_is_inert(browser: Any, live: Live) -> None:
    with opened(browser, live.url) as page:
        script(live, f"{HOSTILE} \u202e{HOSTILE}", HOSTILE)
        say(page, HOSTILE)
        done(page)
        assert page.text_content(".thinking .text") == HOSTILE
        assert page.text_content(".answer") == f"{HOSTILE} \u202e{HOSTILE}"
        assert page.text_content(".turn.user .text") == HOSTILE
        assert page.locator("#log").locator("script, img, a, iframe").count() == 0
        assert page.evaluate("window.hacked") is None


def test_the_policy_stops_what_would_run(browser: Any, live: Live) -> None:
    with opened(browser, live.url, allowed="Content Security Policy|Trusted(HTML|Script)") as page:
        tries = {
            "html": "document.body.innerHTML = '<img src=x onerror=\"window.hacked=1\">'",
            "eval": "window.eval('window.hacked=1')",
            "inline": "const s = document.createElement('script'); s.textContent = 'window.hacked=1'; "
            "document.body.append(s)",
        }
        for name, attempt in tries.items():
            page.evaluate(
                f"() => {{ setTimeout(() => {{ try {{ {attempt} }} catch {{}} }}) }}"
            )  # outside of the debugger
            page.wait_for_timeout(100)
            assert page.evaluate("window.hacked") is None, name
            assert page.is_visible("#question"), name


def test_tool_calls_are_readable_and_take_their_results(browser: Any, live: Live) -> None:
    with opened(browser, live.url) as page:
        page.fill("#tools", json.dumps([LOOK]))
        page.uncheck("#thinking")
        script(live, CALL)
        say(page, "Where?")
        done(page)
        assert page.inner_text(".call p") == "Calls look"
        assert page.text_content(".call pre") == '{\n  "where": "<b>here</b>"\n}'
        assert page.inner_text("#question-label") == "Result of look"
        script(live, "Found.")
        say(page, "behind the tree")
        page.wait_for_selector(".turn.assistant >> nth=1")
        done(page)
        assert re.search(r"<b>here</b>.*behind the tree", prompt(live), re.S)
        assert page.inner_text("#question-label") == "Message"
        assert page.inner_text(".answer >> nth=1") == "Found."


def test_all_of_the_chat_works_by_keyboard(browser: Any, live: Live) -> None:
    with opened(browser, live.url) as page:
        assert page.evaluate("document.activeElement.id") == "question"
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        assert page.input_value("#question") == "one\ntwo"
        page.keyboard.press("Enter")
        done(page)
        assert "one\ntwo" in prompt(live)
        assert page.evaluate("document.activeElement.id") == "question"
        seen, wanted = set(), {"new", "system", "thinking", "temperature", "max-tokens", "tools", "question", "send"}
        for _ in range(30):
            page.keyboard.press("Tab")
            told = page.evaluate("""() => {
                const at = document.activeElement, style = getComputedStyle(at);
                const told = [at, ...(at.labels ?? [])].map((label) => label.textContent.trim()).join("");
                const named = told || at.getAttribute("aria-label");
                return [at.id || at.tagName, at === document.body || !!named,
                        at === document.body || (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2)];
            }""")
            assert told[1] and told[2], told
            seen.add(told[0])
        assert wanted | {"SUMMARY", "A"} <= seen


def test_enter_while_an_answer_runs_keeps_the_text(browser: Any, live: Live) -> None:
    with opened(browser, live.url) as page:
        script(live, "slowly", "hm", hold=1)
        say(page, "first")
        page.wait_for_selector("#stop:visible")
        say(page, "second")
        page.wait_for_timeout(100)
        assert page.input_value("#question") == "second"
        assert page.locator(".turn.user").count() == 1
        page.keyboard.press("Escape")
        done(page)


def test_errors_are_sentences_and_can_be_tried_again(browser: Any, live: Live) -> None:
    with opened(browser, live.url, allowed="Failed to load resource.*400") as page:
        page.uncheck("#thinking")
        page.fill("#temperature", "-3")
        say(page, "hi")
        done(page)
        told = page.inner_text(".error[role=alert] .text")
        assert told.startswith("Temperature is -3") and told.endswith("."), told
        page.fill("#tools", "[{")
        page.click("text=Try again")
        eventually(page, lambda: page.inner_text(".error .text").startswith("The tools are not valid JSON"))
        page.fill("#tools", "")
        page.fill("#temperature", "1")
        script(live, "Well.")
        page.click("text=Try again")
        eventually(page, lambda: page.inner_text(".answer") == "Well.")
        done(page)
        assert page.locator(".error").count() == 0
        page.fill("#temperature", "-3")
        say(page, "more")
        done(page)
        page.fill("#temperature", "1")
        script(live, "Good.")
        say(page, "much more")
        page.wait_for_selector("text=Good.")
        assert page.locator("text=Try again").count() == 0, "the conversation has gone on without it"
        assert len(live.engine.prompts) == 2 and page.locator(".turn.user").count() == 3


def test_an_error_in_the_middle_of_an_answer_is_shown(browser: Any, live: Live) -> None:
    with opened(browser, live.url) as page:
        page.uncheck("#thinking")
        script(live, "It begins")
        live.engine.script.pop()
        live.engine.error = EngineStopped("the engine was closed")
        say(page, "hi")
        done(page)
        assert page.inner_text(".answer") == "It begins"
        assert page.inner_text(".error .text") == "The engine was closed."


def test_a_server_that_is_gone_is_told(browser: Any) -> None:
    with (
        serving(HeldEngine([[EOS]]), served_model()) as live,
        opened(browser, live.url, allowed="net::ERR_CONNECTION_REFUSED") as page,
    ):
        eventually(page, lambda: page.inner_text("#model").startswith("tiny"))
        live.server.should_exit = True
        page.wait_for_timeout(1000)
        say(page, "hi")
        done(page)
        assert page.inner_text(".error .text") == "The server cannot be reached."


def test_a_key_is_asked_for_only_where_the_server_wants_one(browser: Any, live: Live) -> None:
    with opened(browser, live.url) as page:
        eventually(page, lambda: page.inner_text("#model").startswith("tiny"))
        assert page.is_hidden("#key-form")
    with (
        serving(HeldEngine([[EOS]]), served_model(), keys=["secret"]) as guarded,
        opened(browser, guarded.url, allowed="Failed to load resource.*401") as page,
    ):
        page.wait_for_selector("#key-form:visible")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        eventually(page, lambda: page.is_visible("#key-form"))
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        eventually(page, lambda: page.inner_text("#model").startswith("tiny"))
        assert page.is_hidden("#key-form")
        script(guarded, "In.")
        page.uncheck("#thinking")
        say(page, "hi")
        eventually(page, lambda: page.inner_text(".answer") == "In.")
        assert page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])") == (
            '[{},{},""]'
        )


def test_events_survive_any_cut_of_their_bytes(browser: Any, live: Live) -> None:
    rng = random.Random(7)
    cases = []
    for _ in range(150):
        lists = [
            ["".join(rng.choices('aé😀龘: {}"\\', k=rng.randint(0, 6))) for _ in range(rng.randint(1, 3))]
            for _ in range(rng.randint(0, 5))
        ]
        end = rng.choice(["\n", "\r\n"])
        text = ""
        for data in lists:
            text += rng.choice(["", f": a comment{end}", f"event: x{end}", end])
            text += (
                "".join(f"data:{rng.choice(['', ' ']) if line[:1] != ' ' else ' '}{line}{end}" for line in data) + end
            )
        if rng.random() < 0.3:
            text += "data: cut off" + rng.choice(["", end])
        body = text.encode()
        cuts = sorted(rng.sample(range(len(body) + 1), min(len(body), rng.randint(0, 12))))
        parts = [list(body[a:b]) for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        cases.append((parts, ["\n".join(data) for data in lists]))
    with opened(browser, live.url) as page:
        read = page.evaluate(
            """async (all) => {
                const { events } = await import("/pages/sse.js");
                const found = [];
                for (const parts of all) {
                    const body = new ReadableStream({ start(to) {
                        for (const part of parts) to.enqueue(new Uint8Array(part));
                        to.close();
                    } });
                    const got = [];
                    for await (const data of events(new Response(body))) got.push(data);
                    found.push(got);
                }
                return found;
            }""",
            [parts for parts, _ in cases],
        )
    assert read == [wanted for _, wanted in cases]


def card(page: Any, name: str) -> tuple[str, str]:
    """(value, what stands below it)."""
    found = page.locator("#cards li", has_text=name)
    return found.locator(".value").inner_text(), found.locator(".more").inner_text()


def test_the_numbers_of_the_status_page_move(browser: Any, live: Live) -> None:
    with opened(browser, live.url, "/status") as page:
        page.wait_for_selector("#health.good")
        steps = card(page, "Time of a step")[1]
        eventually(page, lambda: card(page, "Time of a step")[0] == "20 ms")
        assert card(page, "Time of a step")[1] != steps
        assert card(page, "Running requests") == ("3", "3 at most")
        assert card(page, "Waiting requests")[0] == "2"
        assert card(page, "Pages in use") == ("20 %", "40 held, 20 kept for reuse, of 200")
        assert card(page, "Slots in use")[0] == "50 %"
        generated, run = (float(card(page, f"Tokens {kind} a second")[0]) for kind in ("generated", "run"))
        assert 20 <= generated <= 60 and 1.9 <= run / generated <= 2.1
        assert 0.4 <= float(card(page, "Preemptions")[0]) <= 1.2
        assert page.evaluate("""() => [...document.querySelectorAll("#cards canvas")].every((chart) =>
            chart.getContext("2d").getImageData(0, 0, chart.width, chart.height).data.some((value) => value))""")


def test_the_status_page_can_pause_and_tells_what_is_down(browser: Any, live: Live) -> None:
    with opened(browser, live.url, "/status") as page:
        page.wait_for_selector("#health.good")
        page.click("#pause")
        page.wait_for_timeout(300)
        asked = live.engine.asked
        page.wait_for_timeout(1500)
        assert (live.engine.asked, page.get_attribute("#pause", "aria-pressed")) == (asked, "true")
        live.engine.stopped = True
        page.click("#pause")
        page.wait_for_selector("#health.bad")
        assert page.inner_text("#health").startswith("The engine does not answer: the engine's process was killed")
        live.engine.stopped, live.engine.asked = False, 0
        page.wait_for_selector("#health.good")
        assert not card(page, "Tokens generated")[0].startswith("-")


def test_the_map_of_experts_is_read_with_arrow_keys(browser: Any, live: Live) -> None:
    with opened(browser, live.url, "/status", allowed="Multiple readback operations") as page:
        page.wait_for_selector("#heat:visible")
        eventually(page, lambda: page.inner_text("#experts-told").startswith("The busiest is expert 2 of layer 1"))
        page.click("#pause")
        page.wait_for_timeout(300)
        page.focus("#heat")
        for key in ("ArrowLeft", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        assert re.fullmatch(r"Layer 1, expert 2: chosen (\d+) times, 1\.75 x the mean\.", page.inner_text("#cell"))
        colours = page.evaluate("""() => {
            const map = document.getElementById("heat"), brush = map.getContext("2d");
            const pixel = (x, y) => [...brush.getImageData(x * map.width, y * map.height, 1, 1).data];
            const at = (l, e) => pixel((e + .3) / 3, (l + .5) / 2);
            return [at(0, 0), at(0, 1), at(1, 0), at(1, 1)];
        }""")
        assert colours[0] == colours[1] == colours[3] != colours[2], "the mean has one colour in all layers"
        page.click("#anew")
        assert page.inner_text("#experts-told") == "Nothing has been chosen since counting began."


CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = (at) => {
    for (; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")].filter((at) => at.checkVisibility() &&
      [...at.childNodes].some((node) => node.nodeType === 3 && node.data.trim())).map((at) => {
    const [a, b] = [light(parse(getComputedStyle(at).color)), light(ground(at))].sort((x, y) => y - x);
    return [(a + .05) / (b + .05), at.tagName + " " + at.textContent.trim().slice(0, 30)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/status"], ids=["chat", "status"])
def test_text_is_easy_to_see_and_fits_a_phone(browser: Any, live: Live, path: str, scheme: str) -> None:
    size = {"width": 320, "height": 640}
    allowed = "Failed to load resource.*400"
    with opened(browser, live.url, path, allowed, viewport=size, color_scheme=scheme) as page:
        if path == "/":
            script(live, "x" * 300, "y" * 200)
            say(page, "w" * 200)
            done(page)
            page.click("#settings summary")
            page.fill("#temperature", "-1")
            say(page, "a")
            done(page)
        else:
            page.wait_for_selector("#heat:visible")
        grounds = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert grounds == {"light": "rgb(247, 248, 250)", "dark": "rgb(18, 21, 28)"}[scheme]
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 10
        assert [told for told in contrasts if told[0] < 4.5] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
