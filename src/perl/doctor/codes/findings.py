"""Codes of what `perl doctor` finds: PRL101 and following."""

from perl.doctor.codes.code import Code

FINDINGS = (
    Code(
        "PRL101",
        "versions of packages",
        "A package that perl-rl needs is missing, or has a version outside of the range that was tested.",
        "The trainer reaches into private parts of TRL and PEFT: with another version it may train something else than "
        "it says, or fail in the middle.",
        "PRL101 trl 1.17.0 is installed, tested is >=1.16,<1.17",
        "Install the range that the line names, best in an environment of its own.",
    ),
    Code(
        "PRL102",
        "accelerator",
        "Which device torch computes on, and how much of its memory is free.",
        "On a CPU only small models train in a reasonable time; memory that another process holds is missing for "
        "activations, and the run ends out of memory.",
        "PRL102 cuda:0 NVIDIA H100: 12.0 of 79.2 GiB are free, another process holds the rest",
        "End the other process (`nvidia-smi` lists them), or choose another GPU with CUDA_VISIBLE_DEVICES.",
    ),
    Code(
        "PRL103",
        "attention",
        "Which kernel computes attention: FlashAttention if it is installed and there is a GPU, else torch's.",
        "With torch's kernel packed rows need a mask, which long rows pay for in time.",
        "PRL103 flash-attn is not installed: torch's attention is used",
        "pip install 'perl-rl[flash]' where the GPU is one of Ampere or newer; or leave it.",
    ),
    Code(
        "PRL104",
        "vLLM",
        "Whether vLLM is in this environment, and whether its version is one that was tested.",
        "Without it rollouts come from transformers, which is right and slower, or from servers elsewhere.",
        "PRL104 vLLM is not installed: rollouts come from transformers, or from servers",
        "pip install 'vllm>=0.32,<0.33', or start servers in an environment of their own (`perl rollout command`).",
    ),
    Code(
        "PRL105",
        "optional packages",
        "Which extras are not installed: scores of lighteval's tasks, pictures, quantised bases, DeepSpeed.",
        "What needs one is refused in one line before a model is loaded.",
        "PRL105 not installed: deepspeed (pip install 'perl-rl[deepspeed]')",
        "Install those that you use.",
    ),
    Code(
        "PRL106",
        "Hub",
        "Whether there is a login for the Hugging Face Hub, and whether it is switched off.",
        "Without a login nothing is pushed, and models that need consent cannot be loaded.",
        "PRL106 no login: nothing can be pushed",
        "`hf auth login`; offline, unset HF_HUB_OFFLINE to push.",
    ),
    Code(
        "PRL107",
        "folders",
        "Whether the folders of runs and of the Hub's cache can be written, and how much room is on their disks.",
        "A full disk or a folder of somebody else's ends a run at its first checkpoint.",
        "PRL107 runs/ has 0.4 GiB left on its disk",
        "Free some room, or choose another place: --output, HF_HOME.",
    ),
    Code(
        "PRL108",
        "cores and threads",
        "How many cores this process may use, how many threads torch takes, and what those cost.",
        "Threads wait for each other. With more threads than free cores each operation takes as long as the scheduler "
        "needs to run all of them in turn: scoring was 13 times slower with two threads too many.",
        "PRL108 torch takes 16 threads on 2 cores, which is 9.1 times slower than 1 thread",
        "export OMP_NUM_THREADS=CORES, or engine.threads in the recipe; or wait until the other processes are done.",
    ),
    Code(
        "PRL109",
        "memory",
        "How much memory of the machine is free.",
        "Without a GPU base, adapter and activations lie there; with one the weights pass through it.",
        "PRL109 0.9 of 23.5 GiB of memory are free",
        "End other processes; `perl plan RECIPE` says what a run needs.",
    ),
    Code(
        "PRL120",
        "the recipe",
        "Everything that `perl train RECIPE --dry-run` would refuse.",
        "The run would not start.",
        "PRL120 recipe.yaml:4: peft.rnak: unknown key (did you mean rank?)",
        "What the line says.",
    ),
    Code(
        "PRL121",
        "the recipe's servers",
        "Whether its vLLM servers answer, serve its base, and can be given an adapter.",
        "A run without servers waits for them and then ends.",
        "PRL121 1 of 2 servers answers",
        "Start them: `perl rollout command RECIPE` prints how.",
    ),
    Code(
        "PRL122",
        "memory and time of the recipe",
        "What `perl plan` says of the recipe on what is here.",
        "A run that does not fit ends out of memory in its first step.",
        "PRL122 needs 92.1 GiB at least, does NOT fit 79.2 GiB of A100 80GB",
        "A smaller model, fewer tokens in a completion, quantization: nf4, or more processes with strategy: fsdp2.",
    ),
)
