"""Dispatches to the commands, whose modules are imported when they run.

arguments -> exit code

The one place where an error becomes a line and an exit code.
"""

import importlib
import signal

import click

import perl
from perl.algorithms.registry import load_extensions
from perl.cli import COMMANDS
from perl.cli.output import ARGUMENTS, say
from perl.errors import EXIT_DONE, EXIT_INTERRUPTED, PerlError, did_you_mean
from perl.recipe.recipe import is_first_process
from perl.run.files import file_access_error

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
        load_extensions()
        module, _, function = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(f"perl.cli.{module}"), function)
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
        return _told(_explained(error))
    except PerlError as error:
        return _told(error)
    except (click.Abort, KeyboardInterrupt):
        if is_first_process():  # of several each is
            say("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return EXIT_DONE
    except Exception as error:  # the process ends here: of a full disk or a vanished file a line is enough
        told = file_access_error(error)
        if told is None:
            raise
        return _told(told)
    return result if isinstance(result, int) else EXIT_DONE


def _told(error: PerlError) -> int:
    """Prints a line a mistake; the exit code."""
    for mistake in () if error.already_reported else error.mistakes:
        say(f"error: {mistake} [{error.code}]", err=True, colour="red")
    return error.exit_code


def _explained(error: click.ClickException) -> PerlError:
    """What is wrong with the arguments, with the option or command that was meant, or where they are listed."""
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else ""
    listed = f"{command} --help" if command else ""
    if isinstance(error, click.NoSuchOption):
        return PerlError(f"no such option {error.option_name!r}", command, _meant_by(error) or listed)
    if isinstance(error, click.BadParameter) and error.param is not None and error.param.name == "device":
        return PerlError(_sentence(error), command, _WHICH_GPU)
    if isinstance(error, click.NoSuchCommand):
        group = error.ctx.command if error.ctx is not None else None
        known = group.list_commands(error.ctx) if isinstance(group, click.Group) and error.ctx is not None else ()
        near = did_you_mean(error.command_name, known)
        if isinstance(group, click.Group) and any("--adapter" in one.opts for one in group.params):
            near = f"an adapter is named by --adapter {error.command_name}; {near}"
        return PerlError(f"no such command {error.command_name!r}", command, near)
    return PerlError(_sentence(error), command, listed)


def _sentence(error: click.ClickException) -> str:
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _meant_by(error: click.NoSuchOption) -> str:
    """How a setting is written, several GPUs are used or one is chosen, else the nearest option; or nothing."""
    if not error.option_name.startswith("--") or error.ctx is None:
        return ""
    from perl.recipe.places import places_of

    parameters = error.ctx.command.params
    known = {name for one in parameters for name in (*one.opts, *one.secondary_opts) if name.startswith("--")}
    plain = [name.removeprefix("--") for name in (*known, *error.ctx.help_option_names)]
    near = did_you_mean(error.option_name.removeprefix("--"), plain)
    near = near.replace("did you mean ", "did you mean --") if near.startswith("did ") else ""
    names = {one.name for one in parameters}
    place = next(iter(places_of(error.option_name)), "")
    said = ""
    if place == "engine.processes" and "processes" in names:
        said = "--processes N uses N GPUs, one process each"
    elif place == "engine.device" and names & {"overrides", "device"}:
        said = _WHICH_GPU
    elif place and "overrides" in names:
        said = f"settings stand after the recipe, {place}=VALUE"
    return " ".join(filter(None, (near, said)))


_WHICH_GPU = "a GPU is used if there is one (auto); CUDA_VISIBLE_DEVICES says which"
