"""The stages of a campaign, a file each: `run` does one on its folder."""
