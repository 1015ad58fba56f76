"""Training arguments that a recipe must not set: what they would do to a run, and where to say it instead.

name of a field of ``train`` -> what to do
"""

REFUSED: dict[str, str] = {
    "auto_find_batch_size": "a smaller batch would break the prompt groups; set train.per_device_train_batch_size",
    "disable_tqdm": "use --quiet",
    "hub_token": "a token must not stand in a file that is saved with the run; use `hf auth login`",
    "model_init_kwargs": "the model section holds them",
    "process_reward_kwargs": "write rewards: {process_reward: {weight: 0.5, args: {model: ...}}}",
    "process_reward_weight": "write rewards: {process_reward: {weight: 0.5, args: {model: ...}}}",
    "push_to_hub": "hub: {repo_id: user/name, push: end} does it",
    "remove_unused_columns": "rewards need the columns, the gold answer among them",
    "resume_from_checkpoint": "run the same command again, it resumes by itself",
    "reward_weights": "write each weight in rewards, as {accuracy: 1.0, format: 0.2}",
    "save_only_model": "a checkpoint without the optimizer's state cannot be resumed exactly",
    "sync_ref_model": "write train.reference: rolling:N",
    "trust_remote_code": "code from a model's repository is not executed",
    "use_cpu": "write engine.device: cpu",
    "use_vllm": "write rollout.backend: vllm",
    "vllm_mode": "write rollout.backend: vllm or vllm-server",
    **{f"vllm_server_{name}": "write rollout.servers: [URL, ...]" for name in ("base_url", "host", "port")},
    "vllm_server_timeout": "write rollout.server_timeout",
}
