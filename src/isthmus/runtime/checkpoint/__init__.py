"""Checkpoints that are saved under one plan and can be read under any other.

Read the files in this order:

- `manifest.py`: the file `manifest.json`, and the rules by which a checkpoint is complete.
- `extents.py`: which elements of a tensor a worker holds, and which elements two workers share.
- `saving.py`: writes each worker's part in the background, and finishes a checkpoint with one rename.
- `reading.py`: opens, verifies, reads and exports checkpoints.
- `worker_state.py`: what a worker saves, and what it loads.
- `tensor_file.py`: writes, hashes and opens safetensors files.
- `folder_lock.py`: keeps two runs from using one folder of checkpoints.
"""
