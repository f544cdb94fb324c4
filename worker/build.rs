//! Compiles kernels/*.cu under the feature `cuda`: one fatbin each, with SASS for the cards that are served and PTX for newer
//! ones. A kernel that spills registers to memory fails the build.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Ampere, Ada, Hopper; and PTX that drivers compile for whatever is newer.
const TARGETS: [(&str, &str); 4] =
    [("80", "sm_80"), ("89", "sm_89"), ("90a", "sm_90a"), ("80", "compute_80")];
/// Compilers at once.
const JOBS: usize = 2;
/// Beginnings of names of kernels that may use local memory; all others promise that everything is in registers.
const MAY_SPILL: [&str; 3] = ["attn_split_256_", "attn_whole_256_", "attn_merge_"];
/// Files all of whose functions may.
const FILES_MAY_SPILL: [&str; 1] = ["sample"];

fn main() -> Result<(), Error> {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    println!("cargo:rerun-if-changed=kernels");
    println!("cargo:rerun-if-env-changed=NVCC");
    println!("cargo:rerun-if-env-changed=THALWEG_KERNEL_SPILLS");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let nvcc = find_nvcc().ok_or(
        "feature `cuda` needs NVIDIA's compiler: set NVCC to its path, put nvcc on PATH, install a CUDA 13 toolkit to \
         /usr/local/cuda, or run `make kernels`, which fetches it from PyPI into .venv",
    )?;
    let sources = sources()?;
    let names: Vec<String> = sources.iter().map(|path| stem(path)).collect();
    compile_all(&nvcc, &sources, &out)?;
    std::fs::write(out.join("fatbins.rs"), table(&names)?)?;
    Ok(())
}

fn sources() -> Result<Vec<PathBuf>, Error> {
    let mut sources = Vec::new();
    for entry in std::fs::read_dir("kernels")? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            sources.push(path);
        }
    }
    sources.sort();
    Ok(sources)
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// A Rust array of name and contents of each fatbin.
fn table(names: &[String]) -> Result<String, Error> {
    let mut text = format!(
        "/// Compiled files of worker/kernels.\npub(super) static FATBINS: [(&str, &[u8]); {}] = [",
        names.len()
    );
    for name in names {
        write!(text, "({name:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\"))), ")?;
    }
    Ok(text + "];\n")
}

/// NVCC, PATH, the usual folder of a toolkit, and PyPI's packages in the workspace's virtual environment.
fn find_nvcc() -> Option<PathBuf> {
    let given = std::env::var_os("NVCC").map(PathBuf::from);
    let on_path = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|path| std::env::split_paths(&path).map(|folder| folder.join("nvcc")).collect::<Vec<_>>());
    let toolkit = [PathBuf::from("/usr/local/cuda/bin/nvcc")];
    let lib = Path::new("../.venv/lib");
    let of_venv = std::fs::read_dir(lib)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("site-packages/nvidia/cu13/bin/nvcc"));
    given.into_iter().chain(on_path).chain(toolkit).chain(of_venv).find(|path| path.is_file())
}

fn compile_all(nvcc: &Path, sources: &[PathBuf], out: &Path) -> Result<(), Error> {
    let next = AtomicUsize::new(0);
    let failures: Mutex<Vec<Error>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..JOBS {
            scope.spawn(|| {
                while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = compile(nvcc, source, out) {
                        failures.lock().expect("nobody panics with it").push(error);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner()?;
    if failures.is_empty() {
        return Ok(());
    }
    Err(failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n").into())
}

fn compile(nvcc: &Path, source: &Path, out: &Path) -> Result<(), Error> {
    let target = out.join(stem(source)).with_extension("fatbin");
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "-t0", "-Xptxas=-v"]);
    for (arch, code) in TARGETS {
        command.arg(format!("-gencode=arch=compute_{arch},code={code}"));
    }
    let output = command.arg(source).arg("-o").arg(&target).output();
    let output = output.map_err(|error| format!("cannot run {}: {error}", nvcc.display()))?;
    let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let errors: Vec<&str> = said.lines().filter(|line| !line.contains("ptxas info")).collect();
        return Err(format!("{}: {}\n{}", source.display(), output.status, errors.join("\n")).into());
    }
    if FILES_MAY_SPILL.contains(&stem(source).as_str()) {
        return Ok(());
    }
    let Err(reason) = check_registers(&said) else { return Ok(()) };
    let reason = format!("{}: {reason}", source.display());
    // For kernels in work: what is slow can still be measured.
    if std::env::var("THALWEG_KERNEL_SPILLS").is_ok_and(|value| value == "allow") {
        println!("cargo:warning={reason}");
        return Ok(());
    }
    Err(reason.into())
}

/// ptxas names a function, and on the next line its stack and spills.
fn check_registers(said: &str) -> Result<(), String> {
    let mut function = "";
    for line in said.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            function = name.trim();
        }
        if !line.contains("bytes stack frame") {
            continue;
        }
        let bytes: Vec<&str> = line.split(',').filter_map(|part| part.split_whitespace().next()).collect();
        let in_memory = bytes.iter().any(|bytes| *bytes != "0");
        if in_memory && !MAY_SPILL.iter().any(|may| function.starts_with(may)) {
            return Err(format!("kernel {function} does not fit its registers:{line}"));
        }
    }
    Ok(())
}
