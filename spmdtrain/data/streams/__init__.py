"""Documents that are tokenised while a run reads them, from this machine or from afar."""
