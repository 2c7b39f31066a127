"""The stages of a campaign, a file each: `run` does one on its folder, `why_again` says why it is done once more."""
