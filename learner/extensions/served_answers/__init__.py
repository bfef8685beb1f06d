"""What servers have answered, joined with the labels that came later: measures of each version as it was served."""
