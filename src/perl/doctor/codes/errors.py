"""Codes of errors: PRL201 and following, one for each class that a user may see."""

from perl.doctor.codes.code import Code

ERRORS = (
    Code(
        "PRL201",
        "the recipe",
        "A recipe, or a setting on the command line, cannot be read or asks for something impossible.",
        "Nothing was started: recipes are checked as a whole before a model is loaded, and each mistake has a line.",
        "error: recipe.yaml:4: peft.rnak: unknown key (did you mean rank?) [PRL201]",
        "Change the key at the place that the line names; `perl train RECIPE --dry-run` checks it again.",
    ),
    Code(
        "PRL202",
        "the data",
        "A data set is absent, empty or incomplete, or holds problems of the held-out set.",
        "A run without answers has no rewards, and scores on problems that were trained on mean nothing.",
        "error: --tasks: aime24.jsonl cannot be read: Permission denied [PRL202]",
        "Fix the file, or name other columns or another set under data.",
    ),
    Code(
        "PRL203",
        "the model",
        "A model or an adapter cannot be loaded, does not fit the other, or would train nothing.",
        "Scores and updates would be those of another policy than the recipe names.",
        "error: --base: my-adapter does not say in its adapter_config.json which base it belongs to (name it) [PRL203]",
        "Name another model, or what the line asks for; a private one needs `hf auth login`.",
    ),
    Code(
        "PRL204",
        "the output folder",
        "A folder cannot be written, is in use by another process, or holds another recipe's run, another study, or "
        "files that were changed since they were written.",
        "A run is gone on with by the same recipe only, a study by the same plan; two in one folder would mix.",
        "error: runs/quickstart: holds a run of another recipe: train.max_steps is 40 there, 60 here "
        "(its steps are its schedule; to train it further: `perl train RECIPE peft.adapter=runs/quickstart --output "
        "ANOTHER`) [PRL204]",
        "Choose another folder with --output, or go on with the recipe that is there. To train a finished run "
        "further: `perl train RECIPE peft.adapter=RUN --output ANOTHER`.",
    ),
    Code(
        "PRL205",
        "an optional package",
        "What was asked for needs a package that is not part of the core and is not installed.",
        "It is refused before a model is loaded, rather than in the middle of a run.",
        "error: strategy zero2 needs the package deepspeed (pip install 'perl-rl[deepspeed]') [PRL205]",
        "Install the extra that the line names, or leave out what needs it.",
    ),
    Code(
        "PRL206",
        "an argument of a command",
        "A command was given something that does not exist or that it cannot do.",
        "Nothing was changed.",
        "error: the zoo has no 'b-vero' (did you mean b-vera?) [PRL206]",
        "What the line says; `perl COMMAND --help` lists the arguments.",
    ),
    Code(
        "PRL207",
        "a promise that broke",
        "A guard found that a result is not what it says: the base's weights changed, a saved adapter is not the "
        "trained one, or an engine samples from another policy.",
        "Nobody's input caused it, and what was made must not be used or published.",
        "error: the adapter in runs/mine/adapter is not the one that was trained: log-probabilities differ by 3.10e-02 "
        "(at most 1e-05) [PRL207]",
        "Do not use the result. If the line names no cause in the recipe it is a defect of perl-rl or of a library: "
        "report it with run.json.",
    ),
    Code(
        "PRL208",
        "a reward function",
        "A custom reward raised, or returned no number, again and again, so that completions cannot be scored.",
        "A policy trained on a part of its rewards learns something else. The run stopped with a checkpoint.",
        "error: recipe.yaml:4: rewards.flaky:reward: failed on 8 samples, at last: reward flaky:reward: "
        "my_rewards.py:3: ValueError: no number for the prompt 'What is 3 + 4?' (stopped after step 3 with a "
        "checkpoint; fix it, and the same command goes on) [PRL208]",
        "Fix the function at the line that is named (`perl reward check RECIPE` tries it), then the same command goes "
        "on.",
    ),
    Code(
        "PRL209",
        "processes of rewards",
        "The processes in which answers are compared, or custom rewards run, could not be started.",
        "Without them a completion that hangs the comparison would hang the training.",
        "error: no worker can be started: [Errno 12] Cannot allocate memory [PRL209]",
        "Free some memory or processes (`ulimit -u`); they need Linux or macOS.",
    ),
    Code(
        "PRL210",
        "rollouts",
        "No completions: no vLLM server answers, or one does not do what it is asked.",
        "The step in hand cannot be made; the last checkpoint is whole.",
        "error: no vLLM server answers, for 600 seconds: http://localhost:8000: Connection refused (start one again; "
        "the same command goes on) [PRL210]",
        "Start the servers again (`perl rollout command RECIPE` prints how), then the same command goes on.",
    ),
    Code(
        "PRL211",
        "access to a server",
        "A vLLM server refuses access, or has a certificate that is not trusted.",
        "Asking again does not help.",
        "error: http://localhost:8000 refuses access (401); VLLM_API_KEY is not set (put its key into that variable, "
        "or name another one: {url: http://localhost:8000, key_env: NAME}) [PRL211]",
        "Set the variable that the line names to the server's key, or trust its certificate (SSL_CERT_FILE).",
    ),
    Code(
        "PRL212",
        "the Hub is unreachable",
        "The Hugging Face Hub does not answer, or fails again and again.",
        "What was to be sent is kept whole in the run's folder; nothing of it is published in part.",
        "error: user/name: the Hub is unreachable: it answers 503 (6 tries) [PRL212]",
        "`perl push RUN` later: it sends what is still missing.",
    ),
    Code(
        "PRL213",
        "lighteval",
        "lighteval failed on completions that are there.",
        "Our own score stands; lighteval's beside it is missing.",
        "error: lighteval: lighteval's process ended with 1: ValueError: no such metric [PRL213]",
        "Look whether its version is the tested one (`perl doctor`); `perl eval --no-lighteval` leaves it out.",
    ),
    Code(
        "PRL214",
        "another process of the run",
        "One of several processes of a run has failed or ended, so that this one cannot go on.",
        "Processes share each step; the last checkpoint is whole.",
        "error: rank 1 has failed: ValueError: no number [PRL214]",
        "Fix what that process says; the same command goes on.",
    ),
    Code(
        "PRL215",
        "a started process",
        "A process that `perl train --processes N` started could not be started, or has died; or verl has failed.",
        "The others are ended; the last checkpoint is whole.",
        "error: rank 3 (pid 4711) was killed by SIGKILL (the same command goes on from step 12) [PRL215]",
        "SIGKILL is most often the machine's memory: `perl plan RECIPE`. Else see what that rank says above.",
    ),
    Code(
        "PRL216",
        "processes do not meet",
        "The processes of a run do not find each other, or were not started with the same recipe.",
        "They would wait for each other for ever.",
        "error: launcher: the launcher has set no MASTER_ADDR and MASTER_PORT [PRL216]",
        "Start all of them with the same command, and look at MASTER_ADDR, MASTER_PORT and the firewall.",
    ),
    Code(
        "PRL217",
        "a lost process",
        "A process of a run that a launcher started has ended, and with it the run.",
        "The others end instead of waiting for it; the last checkpoint is whole.",
        "error: rank 0 (pid 4711) ended without a word, as a process does that is killed (the same "
        "command goes on from step 12) [PRL217]",
        "See what that rank says; then the same command goes on.",
    ),
    Code(
        "PRL218",
        "interrupted",
        "You stopped a run, an evaluation or a study, with Ctrl-C or SIGTERM.",
        "What was done is kept: a run has a checkpoint, and so have the cells of a study. The exit code is 130.",
        "error: runs/mine: stopped after step 12 of 40 (the same command goes on) [PRL218]",
        "The same command goes on, with the same numbers as without the stop.",
    ),
    Code(
        "PRL219",
        "an alarm has ended the training",
        "An alarm that alarms.stop or HealthAlarms(stop=...) names was raised; the training ended with a checkpoint.",
        "What the alarm says goes on otherwise, and costs the rest of the run.",
        "error: alarms.stop: the alarm kl_explosion has ended the training after step 12, with a checkpoint: the KL "
        "divergence to the reference is 8.2 nats per token (start anew with what it says) [PRL219]",
        "Change what the alarm's own line names and start anew; without its name in alarms.stop the run goes on.",
    ),
)
