"""``perl export``: a trained adapter as a plain LoRA, or merged into its base."""

import click

from perl.cli.output import say, set_up_output


@click.command("export", short_help="Write a trained adapter as a plain LoRA or merged into its base.")
@click.argument("source", metavar="DIR")
@click.option("--as", "form", type=click.Choice(["lora", "merged"]), required=True, help="What to write.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of a merged model's weights; the sum is float64 and rounded once.",
)
@click.option("--base", help="The base [default: the one that the run or the adapter names].")
@click.option("-o", "--output", type=click.Path(), help="Folder to write [default: DIR-lora or DIR-merged].")
def command(*, source: str, form: str, dtype: str, base: str | None, output: str | None) -> None:
    """Write the adapter in DIR, a run folder, an adapter's folder, a Hub id or zoo:NAME, in another form.

    `lora` is exact or refused, with the error that could be reached; what was written is loaded again and compared.
    """
    set_up_output(quiet=False)
    from perl.policy.export import export

    done = export(source, "lora" if form == "lora" else "merged", output, dtype, base)
    rank = f"rank up to {done.largest_rank}, " if done.largest_rank is not None else ""
    say(f"{done.form:8} {done.path}  ({rank}log-probabilities differ by at most {done.difference:.1e} nats)")
