"""Several adapters stand in one table, each compared with its own base, and what holds for all is said once."""

import re
from dataclasses import replace

import pytest

from perl.evaluation.adapters_table import adapters_markdown, adapters_table
from perl.evaluation.results import OtherScore
from perl.evaluation.table import WIDEST
from tests.evaluations import results, task_result
from tests.oracles import evaluation as by_hand

BASE = ["0000", "1000", "1100", "1111"] * 5
BETTER = ["1100", "1110", "1111", "1111"] * 5
WORSE = ["0000", "0000", "0000", "1100"] * 5
FEW, FEW_OTHERS = ["10", "01", "11"], ["01", "11", "10"]


def adapter(name: str, *tasks, **subject):
    """Its results; the hash of its weights is its first letter, as often as it fits."""
    return results(*tasks, name=name, adapter_sha256=name[0] * 64, **subject)


OTHER_BASE = {"base": "other/base", "base_sha256": "f" * 64}
LORA = adapter("lora", task_result("sums", BASE, BETTER))
DORA = adapter("dora", task_result("sums", BASE, WORSE))
PISSA = adapter("pissa", task_result("sums", BETTER, BETTER), **OTHER_BASE)


def tables(text: str) -> list[list[dict[str, str]]]:
    """Every table of a Markdown text: its rows by their headings."""
    found = []
    for lines in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines.splitlines()]
        found.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return found


def notes_of(text: str) -> list[str]:
    return [line[2:] for line in text.splitlines() if line.startswith("- ")]


def test_each_adapter_is_compared_with_its_own_base_which_stands_above_it_once():
    (rows,) = tables(adapters_markdown([LORA, PISSA, DORA]))
    assert [row["Policy"] for row in rows] == ["base someone/base", "lora", "dora", "base other/base", "pissa"]
    marks = {"base someone/base": BASE, "lora": BETTER, "dora": WORSE, "base other/base": BETTER, "pissa": BETTER}
    own = {"lora": BASE, "dora": BASE, "pissa": BETTER}
    for row in rows:
        right = by_hand.marks(marks[row["Policy"]])
        score = by_hand.estimate(by_hand.shares(right))
        assert f"{100 * score.mean:.1f} ± {100 * score.stderr:.1f}" in row["avg@4"]
        if row["Policy"] not in own:
            assert (row["difference [95 % interval]"], row["p"]) == ("-", "-")
            continue
        gain = by_hand.difference(by_hand.marks(own[row["Policy"]]), right)
        cell = row["difference [95 % interval]"]
        assert [float(n) for n in re.findall(r"[+-]?\d+\.\d", cell)] == pytest.approx(
            [100 * value for value in (gain.mean, gain.low, gain.high)], abs=0.051
        )


def test_better_and_worse_ones_are_marked_by_p_values_that_are_corrected_over_adapters_and_tasks():
    """Nine wins of ten have p = 2 / 2**9: rare enough among ten differences, and not among fourteen."""
    won = task_result("won", ["00"] * 10, ["11"] * 9 + ["00"])
    lost = task_result("won", ["11"] * 10, ["00"] * 9 + ["11"])
    alike = task_result("alike", FEW, FEW_OTHERS)
    for others, shown in ((4, True), (6, False)):
        several = [
            adapter("a-won", won, alike),
            adapter("b-lost", lost, alike, **OTHER_BASE),
            *(adapter(f"{'cdefgh'[i]}-other", replace(alike, name="won", title="Won"), alike) for i in range(others)),
        ]
        count = 2 * len(several)
        for text in (adapters_markdown(several), adapters_table(several)):
            assert f"Holm over {count // 2} adapters x 2 tasks" in " ".join(text.split())
        of_won = {row["Policy"]: row for row in tables(adapters_markdown(several))[0]}
        assert float(of_won["a-won"]["p"]) == pytest.approx(count * 2 / 2**9, abs=0.0006)
        assert ("**" in of_won["a-won"]["Won avg@2"]) is shown
        assert of_won["b-lost"]["Won avg@2"].endswith(" ↓") is shown
        assert "**" not in of_won["b-lost"]["Won avg@2"]
        assert ("better than its base, ↓: worse than its base" in adapters_markdown(several)) is shown
        assert any(note.startswith("No difference") for note in notes_of(adapters_markdown(several))) is not shown


def test_what_holds_for_all_is_said_once_and_what_does_not_with_whose_it_is():
    notes = notes_of(adapters_markdown([LORA, DORA]))
    assert sum(note.startswith("Protocol perl: temperature 0.6") for note in notes) == 1
    assert sum("Engine: " in note for note in notes) == 1
    assert "Base: someone/base@r1; adapters: lora, sha256 `llllllllllll`, dora, sha256 `dddddddddddd`." in notes
    drifting = replace(DORA, engine={**DORA.engine, "logp_diff": 0.5})
    (engine,) = (note for note in notes_of(adapters_markdown([LORA, drifting])) if "Engine" in note)
    assert engine.endswith("logp_diff 0.5.")
    own = replace(PISSA, protocol=replace(PISSA.protocol, top_k=20))
    notes = notes_of(adapters_markdown([LORA, DORA, own]))
    assert [note.split(":")[0] for note in notes if "Protocol perl" in note] == ["lora, dora", "pissa"]
    assert [note for note in notes if note.startswith("Base: other/base@r1; adapter: pissa, ")]


def test_doubts_name_the_adapter_and_those_of_a_base_are_said_once():
    task = LORA.tasks[0]
    doubtful = replace(task, base=replace(task.base, truncated=0.25), adapter=replace(task.adapter, unjudged=0.05))
    other = replace(DORA.tasks[0], base=replace(task.base, truncated=0.25))
    notes = notes_of(adapters_markdown([replace(LORA, tasks=(doubtful,)), replace(DORA, tasks=(other,))]))
    assert "Not judged: 5.0 % of the completions of lora on Sums; they count as wrong." in notes
    assert "Cut off: 25.0 % of the completions of the base on Sums; with more tokens the score may be another one." in (
        notes
    )


def test_adapters_of_one_name_and_of_a_base_that_scored_otherwise_have_rows_of_their_own():
    twin = replace(LORA, subject={**LORA.subject, "adapter_sha256": "t" * 64})
    (rows,) = tables(adapters_markdown([LORA, twin]))
    assert [row["Policy"] for row in rows] == ["base", "lora (llllllllllll)", "lora (tttttttttttt)"]
    (rows,) = tables(adapters_markdown([LORA, adapter("dora", task_result("sums", WORSE, WORSE))]))
    assert [row["Policy"] for row in rows] == ["base of lora", "lora", "base of dora", "dora"]
    in_bits = replace(DORA, subject={**DORA.subject, "base_quantization": "nf4"})
    (rows,) = tables(adapters_markdown([LORA, in_bits]))
    assert [row["Policy"] for row in rows] == ["base of lora", "lora", "base of dora", "dora"]


def test_without_a_base_there_is_no_row_of_it_and_of_a_base_alone_nothing_else():
    (rows,) = tables(adapters_markdown([adapter("lora", task_result("sums", None, BETTER))]))
    assert [row["Policy"] for row in rows] == ["lora"]
    assert "p" not in rows[0]
    alone = results(task_result("sums", BASE), name="base", adapter_sha256=None)
    (rows,) = tables(adapters_markdown([alone]))
    assert [row["Policy"] for row in rows] == ["base"]


def test_several_tasks_have_a_table_each_in_their_order_and_a_dash_where_one_was_not_asked():
    products = task_result("products", FEW, FEW_OTHERS)
    several = [replace(LORA, tasks=(*LORA.tasks, products)), DORA]
    found = tables(adapters_markdown(several))
    assert [list(rows[0])[1] for rows in found] == [
        *("Sums avg@4", "Products avg@2", "Sums pass@4", "Products pass@2"),
    ]
    assert [row["Products avg@2"] for row in found[1]] == ["66.7 ± 16.7", "66.7 ± 16.7", "-"]
    assert "Holm over 3 differences" in adapters_markdown(several)
    text = adapters_table(several)
    assert all(len(line) <= WIDEST for line in text.splitlines())
    lines = [block.splitlines()[0] for block in text.split("\n\n")]
    assert [line.split()[0] for line in lines] == ["Policy"] * (len(lines) - 1) + ["Protocol"]
    assert text.index("Sums avg@4") < text.index("Products avg@2") < text.index("Sums pass@4")


def test_rows_of_a_task_that_bears_lightevals_name_show_its_own_score():
    def scored(found, mean):
        task = found.tasks[0]
        own = {who: OtherScore(mean, 0.01, 0, 0) for who in ("base", "adapter")}
        return replace(found, tasks=(replace(task, title="Sums (lighteval's prompt)", lighteval=own),))

    (rows,) = tables(adapters_markdown([scored(LORA, 0.5), scored(DORA, 0.25)]))
    assert [row["avg@4 by lighteval"] for row in rows] == ["50.0 ± 1.0", "50.0 ± 1.0", "25.0 ± 1.0"]
    assert "by lighteval" not in adapters_markdown([LORA, DORA])
