"""Mutants that compute the same as the source, or differ only in time, by name, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "00bdd5c650": "an item that one query alone has counts for no other fold, so that its weight is never used",
    "0455ab565b": "between pi/3 and pi/2 both forms of the departure hold and differ by rounding alone",
    "075170ae81": "any negative number says that no row is bad",
    "027d3b5068": "the step projects the velocity once more, which changes nothing",
    "02ba8f99a9": "it decides how many rows are computed at once, and results do not depend on that",
    "052dc66212": "the seed of the other marginal must differ from that of the first, and any other number does",
    "0219aa6046": "it differs only if one number is exactly twice another, and then by one stage of a warm start",
    "01b79e47dc": "it decides after how many iterations float64 takes over, which ends with the same plan",
    "050dd84dd4": "it differs only if two measured numbers are equal, and the bisection then ends at the same weight",
    "041391a9e6": "the constant of a line search: any small number leads to the same optimum",
    "0451e614b4": "it differs only if two fitted numbers are exactly opposite",
    "0000b29ce2": "where the whole gallery is listed already it is searched once more, with the same result",
    "022974fe37": "it differs only if a measured distance equals the limit to the last bit",
    "04e345644f": "a tolerance of rounding, which sums of probabilities exceed by far or not at all",
    "054259bcdf": "scipy keeps correlations between -1 and 1 itself",
    "0134eaf2f9": "at the limit both branches give the limit",
    "004cd51832": "it keeps a division by zero away from rows of zeros, which are refused",
    "019bd7ea7e": "it fills lanes past the end of a row, which are never stored",
    "00254554f1": "it decides how many items are scored at a time, and results do not depend on that",
    "02f8e41b18": "any number that is not below the last column orders the columns and is subtracted again",
    "02ca1d24fb": "the projection is zero only where there is no direction yet, and then it multiplies zero",
}
