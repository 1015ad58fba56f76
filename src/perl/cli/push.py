"""``perl push``: publish a run's adapter on the Hub, or finish what an outage left."""

from typing import TYPE_CHECKING, Literal

import click

from perl.cli.output import set_up_output
from perl.errors import PerlError

if TYPE_CHECKING:
    from perl.hub.commit import Pushed
    from perl.hub.outbox import Push
    from perl.hub.package import Package

_WIDEST_NAME = 40


@click.command("push", short_help="Publish a run's adapter on the Hub, with its card, scores and recipe.")
@click.argument("folder", metavar="RUN")
@click.option("--repo", metavar="USER/NAME", help="Where to [default: the recipe's hub.repo_id, or what is queued].")
@click.option("--which", type=click.Choice(["final", "best"]), help="Which adapter [default: final].")
@click.option("--checkpoints", is_flag=True, help="The checkpoints too, as revisions step-N.")
@click.option("--private", is_flag=True, help="Create the repository so that only you see it.")
@click.option("--message", help="Of the commit.")
@click.option("--dry-run", is_flag=True, help="Print the files and the card; send nothing, load no weights.")
def command(
    *,
    folder: str,
    repo: str | None,
    which: Literal["final", "best"] | None,
    checkpoints: bool,
    private: bool,
    message: str | None,
    dry_run: bool,
) -> None:
    """Publish the adapter of the run in the folder RUN: one commit with everything, or none.

    Before that it is loaded as others will load it and compared with the trained policy, and every file is searched
    for paths, names and tokens. The same command without --repo finishes a push that an outage cut short.
    """
    set_up_output(quiet=False)
    from perl.run import Run

    run = Run.read(folder)  # says what is wrong before anything slow is imported
    if repo is not None and repo.count("/") != 1:
        raise PerlError(f"is no name on the Hub: {repo!r}", "--repo", "user/name")
    from perl.hub.candidate import find_candidate
    from perl.hub.push import pack, push_run, wanted_push
    from perl.hub.retries import HubOutageError

    wanted = wanted_push(run, repo, which, checkpoints=checkpoints, private=private, message=message)
    if dry_run:
        package = pack(find_candidate(run, wanted.which), wanted.repo_id)
        click.echo("\n".join(_preview(package, wanted)))
        return
    try:
        done, difference = push_run(run, wanted)
    except HubOutageError:
        click.echo(f"the push is kept in {run.path}: `perl push {folder}` finishes it", err=True)
        raise
    click.echo("\n".join(_summary(done, difference, wanted)))


def _preview(package: "Package", wanted: "Push") -> list[str]:
    """The files with their sizes, then the card."""
    from perl.hub.card_form import CARD

    lines = [f"{name:{_WIDEST_NAME}} {package.size(name):>13,} bytes" for name in package.files]
    total = sum(map(package.size, package.files))
    return [
        *lines,
        f"{'in all':{_WIDEST_NAME}} {total:>13,} bytes, for {wanted.repo_id}",
        "nothing was sent; the adapter was not loaded and compared, which a push does first",
        "",
        package.content(CARD).decode("utf-8").rstrip("\n"),
    ]


def _summary(done: "Pushed", difference: float | None, wanted: "Push") -> list[str]:
    compared = "loaded anew" if difference is None else f"loaded anew, {difference:.1e} nats from the trained policy"
    news = "" if done.changed else ", which was there already"
    lines = [
        f"pushed   {done.url}",
        f"commit   {done.commit[:12]}{news}: {done.size:,} bytes",
        f"checked  {compared}",
    ]
    if wanted.checkpoints:
        lines.append("steps    each as a revision step-N")
    lines += [f"deleted  {', '.join(done.deleted)}"] if done.deleted else []
    lines += [f"kept     {', '.join(done.foreign)}: not ours"] if done.foreign else []
    return lines
