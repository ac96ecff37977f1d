//! Medians and extremes of a handful of samples.

/// What a report says of the samples of one case.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Summary {
    /// The middle sample; the mean of the two middle ones of an even number.
    pub median: f64,
    /// The smallest sample.
    pub min: f64,
    /// The largest sample.
    pub max: f64,
}

impl Summary {
    /// The summary of `samples`; `None` if there are none, or one is not a finite number.
    pub fn of(samples: &[f64]) -> Option<Self> {
        if samples.is_empty() || samples.iter().any(|sample| !sample.is_finite()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Self { median, min: sorted[0], max: sorted[sorted.len() - 1] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_and_even_numbers_of_samples() {
        assert_eq!(Summary::of(&[3.0, 1.0, 2.0]), Some(Summary { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Summary::of(&[4.0, 1.0, 2.0, 3.0]), Some(Summary { median: 2.5, min: 1.0, max: 4.0 }));
        assert_eq!(Summary::of(&[7.0]), Some(Summary { median: 7.0, min: 7.0, max: 7.0 }));
    }

    #[test]
    fn one_wild_sample_does_not_move_the_median() {
        assert_eq!(Summary::of(&[10.0, 11.0, 9.0, 10.0, 4000.0]).map(|s| s.median), Some(10.0));
    }

    #[test]
    fn nothing_and_nonsense_have_no_summary() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[1.0, f64::NAN]), None);
        assert_eq!(Summary::of(&[f64::INFINITY]), None);
    }
}
