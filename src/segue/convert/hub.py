"""Publish a converted folder on the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from segue.border import checked
from segue.convert.pretrained import RECORD, read_record, verified
from segue.errors import ConfigError, MissingExtraError

NOT_PUBLISHED = ["training/*", "training/**", ".*"]  # how it was made, and drafts


@checked
def push_to_hub(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload a model converted with Segue",
    token: str | None = None,
) -> str:
    """Upload a folder that `segue convert` wrote to the Hugging Face Hub, and return its address.

    The folder is verified first; what is not needed to load the model (`training/`) stays here. Others load it with
    `AutoModelForCausalLM.from_pretrained(repo_id)` after `import segue.convert`.

        segue.convert.push_to_hub("DIR", "me/stories15M-linear", private=True)

    Args:
        folder: The folder of the converted model.
        repo_id: Where: "name/model"; it is made if it does not exist.
        private: Whether a new place is private.
        revision: The branch; by default the main one.
        message: That of the commit.
        token: By default that of `hf auth login`, or HF_TOKEN.
    """
    path = Path(folder)
    if not (path / RECORD).is_file():
        raise ConfigError(f"{path} cannot be pushed.", f"It has no {RECORD}.", "give a folder that `segue convert` wrote.")
    verified(path, read_record(path))
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    except ImportError:
        raise MissingExtraError("push_to_hub needs huggingface_hub.", "It is not installed.", "pip install segue[hf]") from None
    hub = HfApi(token=token, library_name="segue")
    try:
        place = hub.create_repo(repo_id, private=private, exist_ok=True).repo_id
        hub.upload_folder(
            repo_id=place, folder_path=path, revision=revision, commit_message=message, ignore_patterns=NOT_PUBLISHED
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{path} cannot be pushed to {repo_id!r}.", reason, "log in by `hf auth login`, and give a name that is yours."
        ) from error
    return f"{hub.endpoint}/{place}"
