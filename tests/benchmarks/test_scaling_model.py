"""The page about 10,000 GPUs says what the model prints."""

from pathlib import Path

import scaling_model as model

CHECKOUT = Path(__file__).parents[2]


def test_the_page_has_the_models_numbers(capsys):
    model.main()
    printed = capsys.readouterr().out
    page = " ".join((CHECKOUT / "docs" / "internals" / "scale.md").read_text().split())
    job = model.one_job()
    # By hand: 6 FLOPs a parameter and token on 16 GPUs at 40 % of 989 TFLOP/s.
    assert abs(job.training - 6 * 70.55e9 * 1024 * 3000 / (16 * 0.4 * 989e12)) < 1e-6
    faster = [job.step / model.one_job(count, 2 * count).step for count in (16, 64)]
    shown = {
        "GPUs of a job": "416 can", "an update (s)": "takes 205 s", "its completions": "take 199 s",
        "a step (dollars)": "3.42 dollars", "to each GPU": "4.2 TB", "the adapter (MB)": "828 MB",
        "flat mesh": "2.1 TB", "a job's adapter and tokens": "4.2 MB", "every server of its region": "84 GB/s",
        "a server a job": "0.34 with", "any of all GPUs": "every 5 hours", "a job: every": "2,112",
        "10 Gbit/s": "0.7 s late, 0.3 %",
    }  # fmt: skip
    assert all(name in printed and words in page for name, words in shown.items())
    assert f"{faster[0]:.1f} times as fast, 64 times as many {faster[1]:.1f} times" in page
