//! Algorithms that were found by time, kept on disk: one file per kind of GPU, driver and version of cublasLt. A file that cannot be
//! read, or is another's, is as good as none.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use super::kernels::Store;
use super::plan::{Algorithm, Shape};

/// First words of a file; the number goes up when its lines change, or how they are found.
const MAGIC: &str = "thalweg cublasLt plans 3";
/// More is no file of ours.
const BYTES_MAX: u64 = 1 << 20;

/// What products do with their sums.
const STORES: [Store; 5] = [Store::Bf16, Store::F32, Store::AddF32, Store::Gated(0), Store::Gated(1)];

/// What algorithms are good for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Machine {
    /// As the driver names the GPU.
    pub(super) gpu: String,
    pub(super) driver: i32,
    pub(super) cublas_lt: usize,
}

/// Algorithms by shape.
pub(super) type Algorithms = BTreeMap<Shape, Algorithm>;

impl Machine {
    /// Its file in a folder.
    pub(super) fn file(&self, folder: &Path) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
        let gpu: String = self.gpu.chars().map(plain).collect();
        folder.join(format!("cublaslt-{gpu}-{}-{}.plans", self.driver, self.cublas_lt))
    }

    fn head(&self) -> String {
        format!("{MAGIC}; {}; {}; {}", self.gpu, self.driver, self.cublas_lt)
    }
}

/// What a file contains; nothing, and why not, where it is not whole.
pub(super) fn read(path: &Path, machine: &Machine) -> Algorithms {
    let text = match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() > BYTES_MAX => Err(io::Error::other("it is too large")),
        Ok(_) => std::fs::read_to_string(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Algorithms::new(),
        Err(error) => Err(error),
    };
    let found = text.map_err(|error| error.to_string()).and_then(|text| parse(&text, machine));
    found.unwrap_or_else(|reason| {
        tracing::info!(file = %path.display(), reason, "cached plans of cublasLt not used, searching again");
        Algorithms::new()
    })
}

/// Replaces a file in one step: readers see the old or the new.
pub(super) fn write(path: &Path, machine: &Machine, algorithms: &Algorithms) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let own = path.with_extension(format!("{}.new", std::process::id()));
    std::fs::write(&own, format(machine, algorithms))?;
    std::fs::rename(&own, path).inspect_err(|_| drop(std::fs::remove_file(&own)))
}

fn format(machine: &Machine, algorithms: &Algorithms) -> String {
    let mut text = machine.head() + "\n";
    for (Shape { m, n, k, store }, algorithm) in algorithms {
        // Writing to a string cannot fail.
        let _ = write!(text, "{m} {n} {k} {}", name(*store));
        for word in algorithm {
            let _ = write!(text, " {word:016x}");
        }
        text.push('\n');
    }
    let _ = writeln!(text, "end {}", algorithms.len());
    text
}

fn parse(text: &str, machine: &Machine) -> Result<Algorithms, String> {
    let mut lines = text.lines();
    if lines.next() != Some(machine.head().as_str()) {
        return Err("it is of another GPU, driver, library or version".into());
    }
    let mut algorithms = Algorithms::new();
    for line in lines {
        if let Some(count) = line.strip_prefix("end ") {
            let is_whole = count.parse() == Ok(algorithms.len());
            return if is_whole { Ok(algorithms) } else { Err("lines are missing".into()) };
        }
        let (shape, algorithm) = parse_line(line).ok_or_else(|| format!("no shape in {line:?}"))?;
        algorithms.insert(shape, algorithm);
    }
    Err("it has no end".into())
}

fn parse_line(line: &str) -> Option<(Shape, Algorithm)> {
    let words: Vec<&str> = line.split(' ').collect();
    let [m, n, k, store, rest @ ..] = words.as_slice() else { return None };
    let store = STORES.into_iter().find(|known| name(*known) == *store)?;
    let shape = Shape { m: m.parse().ok()?, n: n.parse().ok()?, k: k.parse().ok()?, store };
    let numbers: Option<Vec<u64>> = rest.iter().map(|word| u64::from_str_radix(word, 16).ok()).collect();
    Some((shape, numbers?.try_into().ok()?))
}

fn name(store: Store) -> &'static str {
    match store {
        Store::Bf16 => "bf16",
        Store::F32 => "f32",
        Store::AddF32 => "add",
        Store::Gated(0) => "silu",
        Store::Gated(_) => "gelu",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine { gpu: "NVIDIA H200".into(), driver: 13_000, cublas_lt: 130_200 }
    }

    fn algorithms() -> Algorithms {
        let shape = |m, store| Shape { m, n: 6144, k: 4096, store };
        let of_products = [(Store::Bf16, [1, 2, 3, 4, 5, 6, 7, u64::MAX]), (Store::AddF32, [9; 8])];
        let of_gates = [(Store::Gated(0), [0; 8]), (Store::Gated(1), [1; 8])];
        of_products.into_iter().chain(of_gates).map(|(store, words)| (shape(64, store), words)).collect()
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = machine().file(&folder.path().join("deep"));
        assert!(path.ends_with("cublaslt-nvidia-h200-13000-130200.plans"));
        assert_eq!(read(&path, &machine()), Algorithms::new());
        for algorithms in [Algorithms::new(), algorithms()] {
            write(&path, &machine(), &algorithms).expect("a file");
            assert_eq!(read(&path, &machine()), algorithms);
        }
        let names: Vec<_> = std::fs::read_dir(folder.path().join("deep")).expect("a folder").collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    #[test]
    fn what_is_broken_or_anothers_is_nothing() {
        let whole = format(&machine(), &algorithms());
        let check = |text: String, machine: &Machine, part: &str| {
            let error = parse(&text, machine).expect_err("an error");
            assert!(error.contains(part), "{error:?} does not say {part:?}");
        };
        check(whole.clone(), &Machine { driver: 13_010, ..machine() }, "another GPU");
        check(String::new(), &machine(), "another GPU");
        check(whole.replace("plans 3", "plans 2"), &machine(), "another GPU");
        check(whole.replace("add", "plus"), &machine(), "no shape in");
        check(whole.replace(" 0000000000000001", ""), &machine(), "no shape in");
        check(whole.replace("end 4", "end 3"), &machine(), "lines are missing");
        for cut in 0..whole.len() - 6 {
            assert!(parse(&whole[..cut], &machine()).is_err(), "cut at {cut}");
        }
    }
}
