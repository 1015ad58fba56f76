"""Dispatches to the commands, each in a module of its own that is imported when it runs.

arguments -> exit code

The one place where an error becomes a line and an exit code.
"""

import importlib
import signal

import click

import perl
from perl.cli import COMMANDS
from perl.cli.output import ARGUMENTS, say
from perl.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_MISTAKE, PerlError
from perl.recipe.recipe import is_first_process

EPILOG = """\b
Examples:
  perl train quickstart
  perl train my_recipe.yaml train.learning_rate=2e-5
  perl train my_recipe.yaml --dry-run
  perl reward check my_recipe.yaml
  perl new --model sandbox:base --data my.jsonl --gpu 24
  perl recipes quickstart > my_recipe.yaml
"""


class _Commands(click.Group):
    """The commands by name; importing one must not import the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"perl.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None


@click.command(cls=_Commands, epilog=EPILOG, context_settings={"max_content_width": 110})
@click.version_option(perl.__version__, prog_name="perl-rl")
def commands() -> None:
    """Parameter-efficient reinforcement learning for language models.

    Trains an adapter on a recipe, scores it beside its base, and keeps both with a card. Anything that is not a
    command here goes to the system's Perl.
    """


def run(arguments: list[str], program: str) -> int:
    """Runs the command and turns what it raises into a line and an exit code."""
    try:
        # Not commands.main(): that ends the process by itself, with exit code 1, when the reader of our output left.
        with commands.make_context(program, list(arguments)) as context:
            context.meta[ARGUMENTS] = tuple(arguments)
            result = commands.invoke(context)
    except click.exceptions.Exit as done:  # after --help and --version
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return EXIT_DONE
    except click.ClickException as error:
        _explained(error).show()
        return EXIT_USER_MISTAKE
    except PerlError as error:
        for problem in () if error.told_elsewhere else error.mistakes:
            say(f"error: {problem} [{error.code}]", err=True, colour="red")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        if is_first_process():  # of several each is
            say("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return EXIT_DONE
    return result if isinstance(result, int) else EXIT_DONE


def _explained(error: click.ClickException) -> click.ClickException:
    """The error, with how a setting is written, several GPUs are used or one is chosen, where that was meant."""
    if isinstance(error, click.BadParameter) and error.param is not None and error.param.name == "device":
        return click.BadParameter(f"{error.message} {_WHICH_GPU}", ctx=error.ctx, param=error.param)
    if not isinstance(error, click.NoSuchOption) or not error.option_name.startswith("--") or error.ctx is None:
        return error
    from perl.recipe.places import places_of

    names = {one.name for one in error.ctx.command.params}
    place = next(iter(places_of(error.option_name)), "")
    if place == "engine.processes" and "processes" in names:
        said = "--processes N uses N GPUs, one process each."
    elif place == "engine.device" and names & {"overrides", "device"}:
        said = _WHICH_GPU
    elif place and "overrides" in names:
        said = f"settings stand after the recipe, {place}=VALUE."
    else:
        return error
    return click.NoSuchOption(error.option_name, f"No such option {error.option_name!r}: {said}", ctx=error.ctx)


_WHICH_GPU = "A GPU is used if there is one (auto); CUDA_VISIBLE_DEVICES says which."
