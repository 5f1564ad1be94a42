"""The pages in a real Chromium: what they show, by mouse and by keyboard, and that nothing a peer wrote is ever run."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.config import Config
from swarm.config.shareable import told_settings
from swarm.dashboard.static_files import read_token
from swarm.records.rejection import InvalidRecord, Rejection
from swarm.types import Turn
from tests.chromium import Chromium
from tests.unit.experience_factory import body_and_header, group
from tests.unit.fake_node import evaluation_row
from tests.unit.page_factory import (
    ServedPage,
    merge_entries,
    round_row,
    serving,
    serving_overview,
    some_rollouts,
    status,
)

pytestmark = pytest.mark.browser

LIVE = "document.getElementById('live').dataset.state === 'on'"
HOSTILE = (
    '<img src=x onerror="window.owned=1"><script>window.owned=1</script><svg/onload=window.owned=1>'
    "</pre></details><a href='javascript:window.owned=1'>x</a>\u202e\u2066txt\x1b[31m{{7*7}}${7*7}"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with Chromium() as one:
        yield one


@pytest.fixture
def browser(chromium: Chromium) -> Chromium:
    chromium.open("about:blank")
    chromium.pump()
    chromium.resize(1200, 900)
    chromium.console.clear()
    chromium.requested.clear()
    return chromium


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ServedPage]:
    with serving(tmp_path) as one:
        yield one


def fill(node: ServedPage, num_peers: int = 5, **told: Any) -> dict[str, Any]:
    row = round_row(1, random.Random(0), **merge_entries(1, "12D3KooWPeer00000001", 1))
    node.show(row, status(num_peers, row, **told))
    return row


def open_live(browser: Chromium, node: ServedPage, fragment: str = "") -> None:
    browser.open(node.url + fragment)
    browser.wait_for(LIVE)
    browser.wait_for("document.querySelectorAll('#tiles div').length > 0")


def look_at(browser: Chromium, view: str) -> None:
    """Choose a view of the page by its link, as a person does."""
    browser.run(f"document.querySelector('nav a[href=\"#{view}\"]').click()")
    browser.wait_for(f"!document.getElementById('view-{view}').hidden")


def complaints(browser: Chromium, node: ServedPage) -> list[str]:
    """What the console holds against this page; news of a node that an earlier test has ended may come late."""
    return [told for told in browser.console if "net::ERR_" not in told or node.url in told]


def reload(browser: Chromium) -> None:
    browser.run("window.isOld = true; location.reload()")
    browser.wait_for("!window.isOld && document.readyState === 'complete'")


def text(browser: Chromium, selector: str) -> str:
    return browser.run(f"document.querySelector({json.dumps(selector)}).innerText")


def test_a_page_shows_the_node_asks_nobody_else_and_breaks_no_policy(browser: Chromium, node: ServedPage) -> None:
    fill(node, 200)
    some_rollouts(node.page)
    open_live(browser, node)
    look_at(browser, "swarm")
    browser.wait_for("document.querySelectorAll('#peers-table tbody tr').length === 200")
    assert text(browser, "#name") == "brave-otter-3f"
    assert "its claimed reward is not the one that this node computed" in text(browser, "#rejected-table")
    look_at(browser, "rollouts")
    browser.wait_for("document.querySelectorAll('#groups details').length === 12")
    browser.run("document.querySelector('#groups details').open = true")
    browser.wait_for("document.querySelector('#groups details[open] pre')")
    assert "State the sum of" in text(browser, "#groups details[open] pre")
    assert complaints(browser, node) == []
    assert browser.requested and all(url.startswith(node.url) for url in browser.requested if url != "about:blank")


def test_a_round_is_seen_without_a_reload_and_a_lost_line_is_told_and_found_again(
    browser: Chromium, tmp_path: Path
) -> None:
    with serving(tmp_path) as node:
        fill(node)
        open_live(browser, node)
        row = round_row(2, random.Random(1), **merge_entries(2, "12D3KooWPeer00000002", 2))
        node.show(row, status(5, row))
        browser.wait_for("document.querySelectorAll('#merges-table tbody tr').length === 2")
        browser.wait_for("document.querySelector('#tiles div:nth-child(2) dd').textContent === '2'")
        port = int(node.url.rstrip("/").rpartition(":")[2])
    browser.wait_for("document.getElementById('live').dataset.state === 'off'")
    assert "connection lost" in text(browser, "#live")
    with serving(tmp_path, port=port) as again:  # the same node, started again
        row = round_row(3, random.Random(1))
        again.show(row, status(6, row))
        browser.wait_for(LIVE, deadline_s=40)
        browser.wait_for("document.querySelectorAll('#peers-table tbody tr').length === 6")


def test_a_node_that_says_reset_without_end_is_asked_once_in_a_while(browser: Chromium, node: ServedPage) -> None:
    """The overview passes events of any node on; each snapshot costs it, too."""
    fill(node)
    open_live(browser, node)
    browser.requested.clear()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        node.loop.call_soon_threadsafe(node.page._feed.publish, "reset", {})
        browser.run("new Promise((done) => setTimeout(done, 10))")
    asked = [url for url in browser.requested if url.endswith("api/state")]
    assert len(asked) <= 2
    browser.wait_for(LIVE)


def test_what_peers_wrote_is_text_wherever_it_is_shown(browser: Chromium, node: ServedPage) -> None:
    peer = {"peer_id": HOSTILE, "name": HOSTILE, "lineage": HOSTILE, "weight": HOSTILE, "reward_mean": 0.5}
    row = round_row(1, random.Random(0), **merge_entries(1, HOSTILE, 1)) | {
        "exchange/rejected": {HOSTILE: 3}, "health/warnings": [HOSTILE], "merge/reasons": {HOSTILE: 2},
    }  # fmt: skip
    more = {"advice": [HOSTILE], "last_taken_by": HOSTILE}
    stages = [{"stage": 0, "first_layer": 0, "end_layer": 3, "holder": HOSTILE}]
    node.page._stages = lambda: stages
    node.show(row, status(0, row, peers=[peer], contribution=more, phase=HOSTILE, peer_name=HOSTILE))
    node.page.rollouts.explain(lambda ref: HOSTILE)
    node.page.rollouts.admitted([group(HOSTILE, "b", index=1)])
    body, header = body_and_header(group("x", "y"))
    node.page.rollouts.refused(header, InvalidRecord(Rejection.TOKENS, HOSTILE), body)
    open_live(browser, node)
    look_at(browser, "rollouts")
    browser.wait_for("document.querySelectorAll('#groups details').length === 2")
    browser.run("document.querySelectorAll('#groups details').forEach(one => { one.open = true })")
    browser.wait_for("document.querySelectorAll('#groups details[open] pre').length >= 3")
    browser.wait_for("document.querySelectorAll('#merges-table tbody tr').length === 1")
    browser.run("document.querySelectorAll('.view').forEach(one => { one.hidden = false })")
    names = {
        "rollout/reward_by_source": {HOSTILE: 0.5, "__proto__": 0.5},
        f"reward/{HOSTILE}": 0.5,
        "reward/__proto__": 0.5,
    }
    node.show(round_row(2, random.Random(0), **names))
    browser.run("location.hash = '#learning'")
    browser.wait_for(
        "document.querySelectorAll('#charts-learning figure:not([hidden]) .legend:not([hidden]) li').length >= 8"
    )
    assert (
        browser.run("Object.keys(Object.prototype).length + [...Array(9).keys()].filter(key => key in {}).length") == 0
    )
    browser.run("document.querySelectorAll('.view').forEach(one => { one.hidden = false })")
    assert browser.run("window.owned") is None
    assert browser.run("document.querySelectorAll('main img, main script, main svg:not(.plot), main a').length") == 0
    shown = browser.run("document.body.innerText")
    assert shown.count("<img src=x onerror") >= 8
    assert "\u202e" not in shown and "\x1b" not in shown and "\\u202e" in shown
    assert not any(mark in browser.run("document.title") for mark in ("\u202e", "\x1b"))
    assert complaints(browser, node) == []


def test_the_browser_itself_refuses_markup_from_text_and_foreign_scripts(browser: Chromium, node: ServedPage) -> None:
    open_live(browser, node)
    refused = browser.run(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } catch (e) { return e.name; } })()"
    )
    assert refused == "TypeError"
    browser.run(
        "{ const s = document.createElement('style'); s.textContent = 'body{display:none}'; document.head.append(s); }"
    )
    assert browser.run("getComputedStyle(document.body).display") == "block"


def test_controls_work_by_keyboard_and_only_with_the_token(browser: Chromium, node: ServedPage) -> None:
    fill(node)
    open_live(browser, node)
    assert browser.run("document.getElementById('pause-training').disabled")
    open_live(browser, node, "#token=wrong")
    reload(browser)
    browser.wait_for(LIVE)
    browser.wait_for("!document.getElementById('pause-training').disabled")
    browser.run("document.getElementById('pause-training').focus()")
    browser.press("Enter")
    browser.wait_for("document.getElementById('control-says').textContent.includes('token is missing or wrong')")
    assert not node.controls.state()["training_paused"]
    browser.run(f"location.hash = 'token={read_token(node.folder)}'")
    browser.wait_for("!document.getElementById('pause-training').disabled")
    assert browser.run("location.href") == node.url  # the address keeps no token
    browser.run("document.getElementById('pause-training').focus()")
    browser.press(" ")
    browser.wait_for("document.getElementById('pause-training').textContent === 'Resume training'")
    assert node.controls.state()["training_paused"]
    browser.press("Tab")
    assert browser.run("document.activeElement.id") == "checkpoint"
    browser.press("Enter")
    browser.wait_for("document.getElementById('checkpoint').textContent.startsWith('Saving')")
    assert all(read_token(node.folder) not in url for url in browser.requested)


def test_the_first_tab_skips_to_the_content_and_every_control_shows_its_focus(
    browser: Chromium, node: ServedPage
) -> None:
    fill(node)
    open_live(browser, node)
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"
    seen: list[str] = []
    for _ in range(40):
        browser.press("Tab")
        outline, tag = browser.run(
            "[getComputedStyle(document.activeElement).outlineStyle, document.activeElement.tagName]"
        )
        seen.append(tag)
        assert tag == "BODY" or outline != "none", seen
    assert {"A", "BUTTON", "DIV"} <= set(seen)


def test_tables_sort_and_charts_are_read_by_keyboard(browser: Chromium, node: ServedPage) -> None:
    fill(node, 20)
    open_live(browser, node)
    look_at(browser, "swarm")
    browser.wait_for("document.querySelectorAll('#peers-table tbody tr').length === 20")
    trust = "document.querySelectorAll('#peers-table th[scope=col]')[2]"
    values = "[...document.querySelectorAll('#peers-table tbody tr')].map(line => Number(line.cells[2].textContent))"
    browser.run(f"{trust}.querySelector('button').focus()")
    for key, order, falls in (("Enter", "descending", True), (" ", "ascending", False)):
        browser.press(key)
        assert browser.run(f"{trust}.getAttribute('aria-sort')") == order
        assert browser.run(values) == sorted(browser.run(values), reverse=falls)
    browser.run("(() => { const find = document.getElementById('peers-find'); find.value = 'nobody-like-that';"
                " find.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert "No peer known yet" in text(browser, "#peers-table")
    row = round_row(2, random.Random(1))
    node.show(row, status(20, row))
    look_at(browser, "now")
    pad = "document.querySelectorAll('[role=slider]')[1]"
    browser.wait_for(f"{pad}.getAttribute('aria-valuemax') === '1'")
    browser.run(f"{pad}.focus()")
    browser.press("Home")
    assert browser.run(f"{pad}.getAttribute('aria-valuetext')").startswith("round 1, ")


VIEWS = ("now", "learning", "swarm", "rollouts", "logs", "config")
THEMES = [("light", 1200), ("dark", 1200), ("light", 390), ("dark", 390)]
CONTRASTS = """(() => {
  const channel = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const colour = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const found = colour(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length || element.closest('.hidden')) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(colour(element.namespaceURI.endsWith('svg') ? style.fill : style.color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([element.tagName, String(element.className), element.textContent.slice(0, 30), ratio]);
  }
  return poor;
})()"""


@pytest.mark.parametrize(("theme", "width"), THEMES)
def test_text_has_contrast_and_the_page_fits_in_every_theme_and_width(
    browser: Chromium, node: ServedPage, theme: str, width: int
) -> None:
    fill(node, 12, contribution={"advice": ["Nobody has taken a body for an hour."]})
    some_rollouts(node.page)
    _, header = body_and_header()
    node.page.rollouts.refused(header, InvalidRecord(Rejection.UNAVAILABLE, "at nobody"), None)
    browser.prefer(**{"prefers-color-scheme": theme})
    browser.resize(width, 900)
    open_live(browser, node)
    look_at(browser, "rollouts")
    browser.wait_for("document.querySelectorAll('#groups details').length === 13")
    browser.run("document.querySelectorAll('#groups details').forEach(one => { one.open = true })")
    browser.wait_for("document.querySelectorAll('#groups pre').length > 12")
    for view in VIEWS:
        look_at(browser, view)
        if view == "config":
            browser.run("document.getElementById('config-changed').click()")
            browser.wait_for("document.querySelectorAll('#config-table tbody tr').length > 100")
        assert browser.run(CONTRASTS) == [], view
        assert browser.run("document.documentElement.scrollWidth") <= width, view
    expected = "rgb(16, 19, 22)" if theme == "dark" else "rgb(245, 246, 244)"
    assert browser.run("getComputedStyle(document.body).backgroundColor") == expected


def test_the_switch_wins_over_the_systems_theme_and_is_remembered(browser: Chromium, node: ServedPage) -> None:
    browser.prefer(**{"prefers-color-scheme": "light"})
    open_live(browser, node)
    browser.run("document.getElementById('theme').click(); document.getElementById('theme').click()")
    reload(browser)
    browser.wait_for(f"{LIVE} && document.getElementById('theme').textContent === 'Theme: dark'")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 22)"
    browser.run("document.getElementById('theme').click()")


def test_structure_for_screen_readers(browser: Chromium, node: ServedPage) -> None:
    fill(node)
    open_live(browser, node)
    browser.wait_for("document.querySelectorAll('#peers-table tbody tr').length > 0")
    browser.run("document.querySelectorAll('.view').forEach(one => { one.hidden = false })")
    assert browser.run("document.querySelectorAll('h1').length") == 1
    assert browser.run("document.querySelectorAll('main').length") == 1
    unnamed = (
        "[...document.querySelectorAll('button, input, [role=region], [role=slider], table, nav, section')].filter(one =>"
        " !(one.textContent.trim() || one.labels?.length || one.getAttribute('aria-label') || one.ariaLabelledByElements?.length)"
        ").map(one => one.outerHTML)"
    )
    assert browser.run(unnamed) == []
    assert browser.run("[...document.querySelectorAll('thead th')].every(th => th.scope === 'col')")
    assert browser.run("document.querySelectorAll('tbody th[scope=row]').length") > 4
    assert browser.run("document.querySelectorAll('[aria-live], [role=status], [role=alert], output').length") <= 2


LONG = "The product is 15, and half of it is no whole number. " * 60


def test_every_view_of_a_long_run_is_short_and_has_its_own_address(browser: Chromium, node: ServedPage) -> None:
    rng = random.Random(0)
    for number in range(0, 60, 10):
        node.page.show_row(evaluation_row(number, "interval", number / 60))
        for one in range(number + 1, number + 11):
            node.page.show_row(round_row(one, rng, **merge_entries(one, "12D3KooWPeer00000001", one)))
    node.loop.call_soon_threadsafe(
        node.page.show_status, status(200, round_row(60, rng), verdict="contributing", why="so it is")
    )
    some_rollouts(node.page)
    node.page.rollouts.own([group(LONG, LONG, index=number) for number in range(40)])
    open_live(browser, node)
    for view in VIEWS:
        look_at(browser, view)
        assert browser.run("document.querySelectorAll('.view:not([hidden])').length") == 1
        assert browser.run("document.querySelector('nav a[aria-current=page]').hash") == f"#{view}"
        browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert browser.run("document.documentElement.scrollHeight") < 1800, view
    look_at(browser, "now")
    assert text(browser, "#tiles div:first-child dd") == "0.00 → 0.83"
    assert text(browser, "#verdict") == "contributing: so it is"
    assert text(browser, "#charts-now figure:nth-child(3) .legend") == "own\nof peers"
    look_at(browser, "learning")
    titles = browser.run(
        "[...document.querySelectorAll('#charts-learning figure:not([hidden]) h3')].map(one => one.textContent)"
    )
    assert titles[:6] == [
        "Held-out reward by task", "Sampled reward by task", "Reward by signal", "Loss", "Gradient norm", "KL to the base",
    ]  # fmt: skip
    assert text(browser, "#charts-learning figure:nth-child(2) .legend") == "sums\nspelling"
    look_at(browser, "swarm")
    assert browser.run("document.querySelectorAll('#map .dot').length") == 13  # the node, and the twelve who gave most
    assert browser.run("document.querySelectorAll('#map .arrow').length") >= 12
    browser.run("location.hash = '#learning'")
    reload(browser)
    browser.wait_for("!document.getElementById('view-learning').hidden")
    assert complaints(browser, node) == []


def test_rollouts_are_searched_and_turned_over_by_page(browser: Chromium, node: ServedPage) -> None:
    fill(node)
    some_rollouts(node.page)
    turns = (Turn("3 * 5 =", "15", "tool", 3, 4), Turn("Is that odd?", "It is.", "user", 5, 6))
    one = group("right", "wrong", index=50)
    episode = replace(one.rollouts[0], turns=turns, signals=(("correct", 1.0), ("format", 0.5)))
    node.page.rollouts.explain(
        lambda ref: f"Question {ref.index}", lambda source, answer: "fifteen" if answer == "right" else ""
    )
    node.page.rollouts.own([replace(one, rollouts=(episode, one.rollouts[1]))])
    node.page.rollouts.own([group("24", "25", index=number) for number in range(60, 90)])
    open_live(browser, node)
    look_at(browser, "rollouts")
    browser.wait_for("document.getElementById('page-of').textContent === 'page 1 of 3'")
    browser.run("document.getElementById('page-after').click()")
    browser.wait_for("document.getElementById('page-of').textContent === 'page 2 of 3'")
    search = (
        "(() => { const find = document.getElementById('rollouts-find'); find.value = %s;"
        " find.dispatchEvent(new Event('input')); })()"
    )
    browser.run(search % json.dumps("question 50"))
    browser.wait_for("document.querySelectorAll('#groups details').length === 1")
    assert "1 group with “question 50”" in text(browser, "#rollouts-note")
    browser.run("document.querySelector('#groups details').open = true")
    browser.wait_for("document.querySelectorAll('#groups .turn').length === 5")
    speakers = browser.run("[...document.querySelectorAll('#groups .turn .who')].map(one => one.textContent)")
    assert speakers == ["policy", "tool", "policy", "environment", "policy"]
    finals = browser.run("[...document.querySelectorAll('#groups .final')].map(one => one.textContent)")
    assert finals == ["Final answer: fifteen", "Final answer: none found"]
    assert "correct 1.00 · format 0.50" in text(browser, "#groups")
    browser.run(search % json.dumps(HOSTILE))
    browser.wait_for("document.querySelectorAll('#groups details').length === 0")
    assert "<img src=x" in text(browser, "#rollouts-note") and browser.run("window.owned") is None
    assert complaints(browser, node) == []


def test_the_log_is_read_filtered_and_goes_on_and_its_text_is_text(browser: Chromium, node: ServedPage) -> None:
    fill(node)
    levels = ("INFO", "INFO", "WARNING", "ERROR")
    lines = [f"2026-11-25 03:55:{n % 60:02},123 {levels[n % 4]:<7} swarm.x: line {n} {HOSTILE!r}\n" for n in range(400)]
    log = node.folder / "logs" / "run-0001.log"
    log.parent.mkdir()
    log.write_text("".join(lines))
    open_live(browser, node, "#logs")
    shown = "[...document.querySelectorAll('#log-lines li')]"
    browser.wait_for(f"{shown}.length === 300")
    assert browser.run(f"{shown}.at(-1).textContent").startswith("2026-11-25 03:55:39 ERROR swarm.x line 399 '<img")
    assert browser.run("window.owned") is None
    region = "document.getElementById('log-lines')"
    assert browser.run(
        f"{region}.scrollTop > 100 && {region}.scrollHeight - {region}.scrollTop - {region}.clientHeight < 2"
    )
    browser.run(f"window.kept = {shown}.at(-1)")
    with log.open("a") as file:
        file.write("2026-11-25 03:56:00,123 INFO    swarm.x: one more at 10.0.0.7\n")
    browser.wait_for(f"{shown}.at(-1).textContent.endsWith('one more at …') && {shown}.at(-2) === window.kept")
    assert browser.run(f"{shown}.length") == 300
    browser.run("(() => { const one = document.getElementById('logs-level'); one.value = 'error';"
                " one.dispatchEvent(new Event('change')); })()")  # fmt: skip
    browser.wait_for(
        f"{shown}.length === 100 && {shown}.every(one => one.querySelector('.level').textContent === 'ERROR')"
    )
    assert browser.run(f"getComputedStyle({shown}[0]).borderLeftStyle") == "double"
    browser.run("(() => { const one = document.getElementById('logs-find'); one.value = 'LINE 39';"
                " one.dispatchEvent(new Event('input')); })()")  # fmt: skip
    browser.wait_for(f"{shown}.length === 4")  # 39, 391, 395, 399
    assert "No line fits" not in text(browser, "#logs-note")
    assert complaints(browser, node) == []


def test_settings_are_shown_with_where_they_come_from(browser: Chromium, tmp_path: Path) -> None:
    with serving(tmp_path) as node:
        config = Config.model_validate({"training": {"lr": 0.5}})
        node.page._settings = told_settings(
            config, lambda place: "--training.lr" if list(place) == ["training", "lr"] else None
        )
        fill(node)
        open_live(browser, node)
        look_at(browser, "config")
        browser.wait_for("document.querySelectorAll('#config-table tbody tr').length === 1")
        row = "[...document.querySelector('#config-table tbody tr').cells].map(one => one.textContent)"
        assert browser.run(row) == ["training.lr", "0.5", "0.001", "--training.lr"]
        browser.run("document.getElementById('config-changed').click()")
        browser.wait_for("document.querySelectorAll('#config-table tbody tr').length > 100")


def test_the_overview_names_nodes_by_their_folders_and_maps_what_they_gave(browser: Chromium, tmp_path: Path) -> None:
    ids = [f"12D3KooWNode{number:08d}" for number in range(3)]
    for number, own in enumerate(ids):
        folder = tmp_path / "testbed" / f"node-{number}"
        folder.mkdir(parents=True)
        rows = [evaluation_row(0, "start", 0.2), *(round_row(n, random.Random(number)) for n in range(1, 21))]
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in [*rows, evaluation_row(20, "end", 0.8)])
        )
        peers = [
            {"peer_id": peer, "groups_admitted": 10 * number + 1, "bodies_taken": 2} for peer in ids if peer != own
        ]
        told = status(0, rows[-1]) | {
            "peer_id": own,
            "peer_name": HOSTILE,
            "pid": 2**22 + 1,
            "addresses": [],
            "peers": peers,
        }
        (folder / "status.json").write_text(json.dumps(told | {"phase": "ended"}))
    with serving_overview(tmp_path / "testbed") as url:
        browser.open(url)
        browser.wait_for("document.querySelectorAll('#nodes-table tbody tr').length === 3")
        browser.wait_for("document.querySelectorAll('#map .arrow').length === 6")
        assert text(browser, "#charts figure:first-child .legend") == "node-0\nnode-1\nnode-2"
        assert browser.run("[...document.querySelectorAll('#map .dot text')].map(one => one.textContent)") == [
            "node-0", "node-1", "node-2",
        ]  # fmt: skip
        first = "[...document.querySelector('#pairs-table tbody tr').cells].map(one => one.textContent)"
        assert browser.run(first)[1:] == ["node-2", "21", "2"]
        assert text(browser, "#tiles div:nth-child(5) dd") == "60"  # rounds, a whole number
        assert browser.run("window.owned") is None
        assert browser.run("document.documentElement.scrollHeight") < 1800


def test_after_a_night_the_page_says_what_was_an_hour_ago_what_stood_still_and_how_much_is_left(
    browser: Chromium, tmp_path: Path
) -> None:
    now_s, rng = time.time(), random.Random(0)
    rows = [evaluation_row(0, "start", 0.2) | {"time_s": now_s - 30_000}]
    for number in range(1, 101):  # one a minute until a second ago; three hours are missing after round 20
        ended_s = now_s - 1 - 60 * (100 - number) - (10_800 if number <= 20 else 0)
        rows.append(round_row(number, rng) | {"time_s": ended_s})
        if number % 30 == 0:
            rows.append(evaluation_row(number, "interval", number / 100) | {"time_s": ended_s})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(tmp_path, max_rounds=220) as node:
        told = status(3, rows[-1], started_at=now_s - 80 * 60)
        node.loop.call_soon_threadsafe(node.page.show_status, told | {"round": 100})
        open_live(browser, node)
        browser.wait_for("document.querySelectorAll('#tiles .more').length === 2")
        browser.wait_for("document.querySelector('#tiles div:nth-child(2) .more').textContent === 'about 2.0 h left'")
        assert text(browser, "#tiles div:nth-child(1)") == "Held-out reward\n0.20 → 0.90\n0.30 70 min ago"
        assert text(browser, "#tiles div:nth-child(2) dd") == "100 of 220"
        assert text(browser, "#still").startswith("No round ended for 3.0 h, until ")


MARKS = (
    "[...document.querySelectorAll('figure:nth-child(2) .grid text[text-anchor=middle]')].map(one => one.textContent)"
)
AXIS = MARKS.replace("'figure", "'#charts-now figure")
PIECES = "document.querySelector('#charts-now figure:nth-child(2) .line').getAttribute('d').match(/M/g).length"


def test_by_time_a_curve_has_clock_marks_and_a_gap_where_the_node_was_off_and_the_address_keeps_it(
    browser: Chromium, tmp_path: Path
) -> None:
    browser.call("Emulation.setTimezoneOverride", timezoneId="Asia/Kolkata")  # half an hour beside full hours
    noon, rng = 1_700_000_000 // 86400 * 86400 + 43_200 - 19_800, random.Random(0)
    times = [noon + 60 * number + (10_800 if number > 40 else 0) for number in range(1, 101)]
    rows = [round_row(number, rng) | {"time_s": time_s} for number, time_s in enumerate(times, 1)]
    rows.insert(0, evaluation_row(0, "start", 0.2) | {"time_s": noon})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(tmp_path) as node:
        node.loop.call_soon_threadsafe(node.page.show_status, status(3, rows[-1]))
        open_live(browser, node)
        browser.wait_for(f"{AXIS}.join() === '0,20,40,60,80,100' && {PIECES} === 1")
        browser.run("document.querySelector('#axis input').focus()")
        browser.press("ArrowRight")
        browser.wait_for(f"{PIECES} === 2")
        assert browser.run(AXIS) == ["14 Nov 12:00", "13:00", "14:00", "15:00", "16:00"]
        assert browser.run("location.search") == "?x=time"
        look_at(browser, "learning")
        browser.run("history.back(); history.back()")
        browser.wait_for(f"location.search === '' && {PIECES} === 1")
        assert browser.run("document.querySelector('#axis input').checked")
        browser.resize(380, 800)
        open_live(browser, node, "?x=time")
        browser.wait_for(f"{AXIS}.join() === '14 Nov 12:00,14:00,16:00'")
        assert browser.run("document.documentElement.scrollWidth") <= 380
        browser.run("document.querySelectorAll('[role=slider]')[1].focus()")
        browser.press("Home")
        read = "document.querySelectorAll('[role=slider]')[1].getAttribute('aria-valuetext')"
        assert browser.run(read).startswith("round 1, 14 Nov 12:01: ")
        open_live(browser, node, "?x=<b>&from=1")
        browser.wait_for(f"{AXIS}.join() === '0,20,40,60,80,100'")
        assert complaints(browser, node) == []
    browser.call("Emulation.setTimezoneOverride", timezoneId="")


def draw_over(browser: Chromium, pad: str, begin: float, end: float) -> None:
    """Press the mouse at one part of a chart's width, and let it go at another."""
    x, y, width = browser.run(
        f"(() => {{ const b = {pad}.getBoundingClientRect(); return [b.x, b.y + 80, b.width]; }})()"
    )
    for kind, part in (("mousePressed", begin), ("mouseMoved", (begin + end) / 2), ("mouseReleased", end)):
        at = x + 44 + part * (width - 56)
        browser.call("Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", buttons=1, clickCount=1)


def test_a_range_drawn_over_a_curve_is_shown_in_detail_on_all_curves_and_kept_in_the_address(
    browser: Chromium, tmp_path: Path
) -> None:
    rng = random.Random(0)
    rows = [round_row(number, rng) | {"time_s": 1.7e9 + 10 * number} for number in range(1, 4001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(tmp_path) as node:
        node.loop.call_soon_threadsafe(node.page.show_status, status(3, rows[-1]))
        open_live(browser, node)
        pad, now = "document.querySelectorAll('[role=slider]')[1]", "document.getElementById('curves-note').textContent"
        browser.wait_for(f"{now}.startsWith('One point for 16 rounds') && {PIECES} === 1")
        draw_over(browser, pad, 0.25, 0.30)
        browser.wait_for(f"{now}.startsWith('One point per round')")
        first, last = browser.run("['from', 'to'].map(one => Number(new URLSearchParams(location.search).get(one)))")
        assert 980 < first < 1020 and 1180 < last < 1220
        assert text(browser, "#range") == f"round {first:,} – round {last:,}"
        assert all(first - 20 <= int(mark.replace(",", "")) <= last + 20 for mark in browser.run(AXIS))
        found = "[...document.querySelectorAll('#charts-now figure:not([hidden]) .grid')].map(one => one.lastChild.textContent)"
        assert len(set(browser.run(found))) == 1  # all curves
        shared = browser.run("location.search")
        browser.run(f"{pad}.focus()")
        browser.press("+")
        browser.wait_for(f"location.search !== {shared!r}")
        browser.press("Escape")
        browser.wait_for(f"location.search === '' && {now}.startsWith('One point for 16 rounds')")
        open_live(browser, node, f"{shared}#learning")
        browser.wait_for(f"{now}.startsWith('One point per round') && !document.getElementById('view-learning').hidden")
        browser.run("document.querySelector('#axis input[value=time]').click()")
        browser.wait_for("location.search.includes('from=17000') && location.search.includes('x=time')")
        browser.wait_for(f"{now}.startsWith('One point per round')")
        browser.run("document.getElementById('whole').click()")
        browser.wait_for(f"location.search === '?x=time' && {now}.startsWith('One point for 16 rounds')")
        assert browser.run("document.getElementById('whole').hidden")
        for odd in ("?from=9&to=1", "?from=-1&to=5", "?from=1&to=1e99", "?from=x&to=y", "?x=time&from=1e12&to=1e12"):
            open_live(browser, node, odd)
            browser.wait_for(f"{now}.startsWith('One point for 16 rounds')")
            assert browser.run("document.getElementById('whole').hidden")
        open_live(browser, node, "?x=time&from=5&to=500")
        browser.wait_for("document.querySelectorAll('#charts-now .plot.none').length >= 2")
        assert "nothing in this range" in text(browser, "#charts-now figure:nth-child(2)")
        browser.run(f"{pad}.dispatchEvent(new MouseEvent('dblclick'))")
        browser.wait_for("location.search === '?x=time' && !document.querySelector('#charts-now .plot.none')")
        assert complaints(browser, node) == []


def test_runs_that_started_at_different_times_are_compared_since_their_start_and_by_the_clock(
    browser: Chromium, tmp_path: Path
) -> None:
    for number, begin in enumerate((1_700_000_000, 1_700_050_000)):
        folder = tmp_path / "testbed" / f"node-{number}"
        folder.mkdir(parents=True)
        rows = [round_row(one, random.Random(0)) | {"time_s": begin + 36.0 * one} for one in range(1, 201)]
        rows += [evaluation_row(one, "interval", 0.5) | {"time_s": begin + 36.0 * one} for one in (0, 100, 200)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        told = status(0, rows[199]) | {"pid": 2**22 + 1, "addresses": [], "phase": "ended", "started_at": begin}
        (folder / "status.json").write_text(json.dumps(told))
    spans = (
        "[...document.querySelectorAll('#charts figure:last-child .line')].map(line =>"
        " { const box = line.getBBox(); return [box.x, box.x + box.width].map(Math.round); })"
    )
    with serving_overview(tmp_path / "testbed") as url:
        browser.open(url + "?x=start")
        browser.wait_for(f"{spans}.length === 2 && {MARKS}.join() === '0.0 h,0.5 h,1.0 h,1.5 h,2.0 h'")
        (first, second) = browser.run(spans)
        assert first == second
        draw_over(browser, "document.querySelectorAll('[role=slider]')[1]", 0.0, 0.5)
        browser.wait_for("location.search.startsWith('?x=start&from=0&to=36')")
        browser.wait_for(f"{MARKS}.at(-1) === '60 min' || {MARKS}.at(-1) === '1.0 h'")
        browser.run("document.getElementById('whole').click()")
        browser.run("document.querySelectorAll('#axis input')[2].click()")
        browser.wait_for(f"{MARKS}.length > 3 && {MARKS}.some(text => text.includes(':00'))")
        (first, second) = browser.run(spans)
        assert first[1] < second[0] - 100
        assert browser.run("location.search") == "?x=time"
        assert text(browser, "#axis-note") == ""


def test_an_overview_says_which_node_is_down_and_why_and_leaves_those_that_ended_in_order(
    browser: Chromium, tmp_path: Path
) -> None:
    for name, told in (("node-1", {"phase": "ended"}), ("node-2", {"phase": "failed", "failure": "out of memory"})):
        folder = tmp_path / "testbed" / name
        folder.mkdir(parents=True)
        row = round_row(3, random.Random(0))
        rows = [evaluation_row(0, "start", 0.25), row, evaluation_row(3, "end", 0.75)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        known = status(0, row) | {"pid": 2**22 + 1, "addresses": [], "written_at": time.time()}
        (folder / "status.json").write_text(json.dumps(known | told))
    with serving_overview(tmp_path / "testbed") as url:
        browser.open(url)
        browser.wait_for("document.querySelectorAll('#advice li').length === 1")
        assert text(browser, "#advice").startswith("node-2: not running, it ended with an error after round 3")
        assert "out of memory" in text(browser, "#advice")
        states = "[...document.querySelectorAll('#nodes-table td[data-verdict]')].map(one => one.textContent)"
        assert browser.run(states) == ["ended", "not running"]
        assert text(browser, "#tiles div:nth-child(2) dd") == "0.25 → 0.75"
        browser.run("document.querySelector('#nodes-table a').click()")
        browser.wait_for("document.getElementById('live')?.dataset.state === 'ended'")
        browser.wait_for("document.querySelector('#tiles dd')?.textContent === '0.25 → 0.75'")
        assert browser.run("[...document.querySelectorAll('nav a')].filter(one => !one.hidden).map(one => one.hash)") == [
            "#now", "#learning", "#swarm", "#logs",
        ]  # fmt: skip


def test_a_page_of_a_node_that_has_just_started_says_so(browser: Chromium, node: ServedPage) -> None:
    node.loop.call_soon_threadsafe(node.page.show_status, status(0, {}, phase="starting", started_at=time.time()))
    open_live(browser, node)
    browser.wait_for("document.getElementById('curves-note').textContent.length > 0")
    assert text(browser, "#phase") == "starting"
    assert "begin with the first round" in text(browser, "#curves-note")
    look_at(browser, "swarm")
    assert "No peer known yet" in text(browser, "#peers-table")
    look_at(browser, "rollouts")
    assert "None yet" in text(browser, "#rollouts-note")
    assert complaints(browser, node) == []
