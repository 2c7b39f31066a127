"""The stages of a campaign, a file each: `run` runs one on its folder, `why_again` returns why it runs once more."""
