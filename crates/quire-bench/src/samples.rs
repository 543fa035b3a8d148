//! Figures from several rounds: medians with their spread, means with their deviation.

use serde_json::Value;

/// What one quantity was in every round.
#[derive(Clone, Default, Debug)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn values(&self) -> &[f64] {
        &self.0
    }

    /// The middle of the rounds.
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            count if count % 2 == 1 => sorted[count / 2],
            count => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
        }
    }

    pub(crate) fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(crate) fn max(&self) -> f64 {
        self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    pub(crate) fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len() as f64
    }

    /// The standard deviation of the sample.
    pub(crate) fn deviation(&self) -> f64 {
        if self.0.len() < 2 {
            return 0.0;
        }
        let mean = self.mean();
        let squares: f64 = self.0.iter().map(|value| (value - mean).powi(2)).sum();
        (squares / (self.0.len() - 1) as f64).sqrt()
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Samples {
        Samples(values.into_iter().collect())
    }
}

impl From<&Samples> for Value {
    fn from(samples: &Samples) -> Value {
        Value::from_iter([
            ("median", Value::from(samples.median())),
            ("min", Value::from(samples.min())),
            ("max", Value::from(samples.max())),
            ("mean", Value::from(samples.mean())),
            ("deviation", Value::from(samples.deviation())),
            ("rounds", samples.values().iter().map(|value| Value::from(*value)).collect()),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two_middles() {
        assert_eq!([3.0, 1.0, 2.0].into_iter().collect::<Samples>().median(), 2.0);
        assert_eq!([4.0, 1.0, 2.0, 3.0].into_iter().collect::<Samples>().median(), 2.5);
        assert!(Samples::default().median().is_nan());
    }

    #[test]
    fn deviation_is_that_of_a_sample() {
        let samples: Samples = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0].into_iter().collect();
        assert_eq!(samples.mean(), 5.0);
        assert!((samples.deviation() - (32.0f64 / 7.0).sqrt()).abs() < 1e-12);
    }
}
