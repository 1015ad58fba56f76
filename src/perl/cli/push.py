"""``perl push``: publish a run's adapter on the Hub, or finish what an outage left."""

from typing import Any

import click

from perl.cli.output import say, set_up_output
from perl.run.tables import plain_table


@click.command("push", short_help="Publish a run's adapter on the Hub, with its card, scores and recipe.")
@click.argument("folder", metavar="RUN")
@click.option("--repo", metavar="USER/NAME", help="Where to [default: what is queued, or the recipe's].")
@click.option("--which", type=click.Choice(["final", "best"]), help="Which adapter [default: final].")
@click.option("--checkpoints", is_flag=True, help="The checkpoints too, as revisions step-N.")
@click.option("--private", is_flag=True, help="Create the repository so that only you see it.")
@click.option("--message", help="Of the commit.")
@click.option(
    "--replace", "overwrite", is_flag=True, help="Overwrite an adapter or a card that is there and not of this run."
)
@click.option("--dry-run", is_flag=True, help="Print the files and the card; send nothing, load no weights.")
def command(*, folder: str, repo: str | None, dry_run: bool, **asked: Any) -> None:  # noqa: ANN401 (as click hands them over)
    """Publish the adapter of the run in the folder RUN: one commit with everything, or none.

    Before that it is loaded as others will load it and compared with the trained policy, and every file passes the
    gate: no links, no files but ours, no secrets, paths or names of this machine. The same command without --repo
    finishes a push that an outage cut short.
    """
    set_up_output(quiet=False)
    from perl.run.folder import Run

    run = Run.read(folder)  # says what is wrong before anything slow is imported
    from perl.hub.card.candidate import find_candidate
    from perl.hub.card.published import CARD
    from perl.hub.push.outbox import read_push
    from perl.hub.push.publish import pack, push_run, targets, wanted_push
    from perl.hub.push.requests import HubOutageError

    for target in targets(run, repo):
        wanted = wanted_push(run, target, **asked)
        if dry_run:
            package = pack(find_candidate(run, wanted.which), wanted.repo_id)
            sizes = {name: len(content) for name, content in package.files.items()} | {"in all": package.size}
            files = plain_table([(name, f"{size:,} bytes") for name, size in sizes.items()])
            say("\n".join(files) + f", for {wanted.repo_id}")
            say("nothing was sent; the adapter was not loaded and compared, which a push does first\n")
            say(package.files[CARD].decode("utf-8").rstrip("\n"))
            continue
        try:
            done, difference = push_run(run, wanted)
        except HubOutageError:
            say(f"the push is kept in {run.path}: `perl push {folder}` finishes it", err=True)
            raise
        pushed = read_push(run, wanted.repo_id)
        steps = pushed.steps if wanted.checkpoints and pushed is not None else None
        compared = (
            "loaded anew" if difference is None else f"loaded anew, {difference:.1e} nats from the trained policy"
        )
        news = "" if done.changed else ", which was there already"
        lines = [
            f"pushed   {done.url}",
            f"commit   {done.commit[:12]}{news}: {done.size:,} bytes",
            f"checked  {compared}",
        ]
        if steps is not None:
            there = ", ".join(f"step-{step}" for step in steps)
            lines.append(
                f"steps    {there}, each a revision" if steps else "steps    none: the run holds no checkpoint"
            )
        if done.replaced:
            lines.append(
                f"replaced {', '.join(done.replaced)} that was there; commit {done.before[:12]} still holds it"
            )
        lines += [f"deleted  {', '.join(done.deleted)}"] if done.deleted else []
        lines += [f"kept     {', '.join(done.foreign)}: not ours"] if done.foreign else []
        say("\n".join(lines))
