"""The commands of `fedspan`, one file each; heavy imports happen inside them, so that `--help` is quick."""
