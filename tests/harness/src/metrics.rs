//! Prometheus' text format, as far as tests ask for it.

/// The samples of one scrape.
#[derive(Clone, Debug)]
pub struct Scrape {
    samples: Vec<Sample>,
}

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: String,
    value: f64,
}

impl Scrape {
    /// Reads every sample line.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        Self { samples: lines.map(sample).collect() }
    }

    /// The sum over all samples of a name whose labels contain `labels`, such as `worker="a"`. None if there are none.
    pub fn sum(&self, name: &str, labels: &str) -> Option<f64> {
        let matching = self.samples.iter().filter(|s| s.name == name && s.labels.contains(labels));
        matching.map(|s| s.value).reduce(|a, b| a + b)
    }

    /// The same, of a metric that must be there.
    pub fn value(&self, name: &str) -> f64 {
        self.sum(name, "").unwrap_or_else(|| panic!("there is no metric {name}"))
    }

    /// The same, 0 where there is none: a counter that has not counted yet.
    pub fn count(&self, name: &str, labels: &str) -> f64 {
        self.sum(name, labels).unwrap_or(0.0)
    }

    /// One value per sample of a name.
    pub fn values(&self, name: &str) -> Vec<f64> {
        self.samples.iter().filter(|s| s.name == name).map(|s| s.value).collect()
    }
}

fn sample(line: &str) -> Sample {
    let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line:?}"));
    let (name, labels) = series.split_once('{').unwrap_or((series, ""));
    let value = value.parse().unwrap_or_else(|_| panic!("no number: {line:?}"));
    Sample { name: name.to_owned(), labels: labels.trim_end_matches('}').to_owned(), value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_over_labels() {
        let scrape = Scrape::parse("# HELP a x\na{w=\"1\",k=\"x\"} 2\na{w=\"2\"} 0.5\nb 7\n# EOF\n");
        assert_eq!(scrape.value("a"), 2.5);
        assert_eq!(scrape.sum("a", "w=\"2\""), Some(0.5));
        assert_eq!(scrape.values("a"), [2.0, 0.5]);
        assert_eq!(scrape.value("b"), 7.0);
        assert_eq!(scrape.sum("c", ""), None);
    }
}
