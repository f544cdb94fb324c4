//! NVIDIA's libraries, opened at run time: nothing of CUDA is linked, and a machine without it runs the same binary.

use std::path::{Path, PathBuf};

use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::error::CudaError;

const DRIVER: &str = "libcuda.so.1";
const CUBLAS_LT: &str = "libcublasLt.so.13";
/// CUDA 13.0: what the kernels' SASS needs.
const DRIVER_VERSION_MIN: i32 = 13_000;
const CUBLAS_LT_VERSION_MIN: usize = 130_000;

/// Opens the driver's library; its functions may be called from then on.
pub(super) fn load_driver(folder: Option<&Path>) -> Result<(), CudaError> {
    open(DRIVER, folder)?;
    // SAFETY: looks for a library of a known name, and closes it again.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::Library { library: DRIVER, tried: "it opens, but not by its name".into() });
    }
    let version = driver_version()?;
    if version < DRIVER_VERSION_MIN {
        let found = format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(CudaError::Version { library: DRIVER, found, needed: "13.0 (driver 580)" });
    }
    Ok(())
}

/// Newest CUDA that the driver knows, as 1000 times its major and 10 times its minor number. Its library must be open.
pub(super) fn driver_version() -> Result<i32, CudaError> {
    let mut version = 0;
    // SAFETY: the call writes one integer and needs no initialisation.
    super::error::check(unsafe { sys::cuDriverGetVersion(&raw mut version) }, || {
        "cuDriverGetVersion".into()
    })?;
    Ok(version)
}

/// Opens cublasLt.
pub(super) fn load_cublas_lt(folder: Option<&Path>) -> Result<(), CudaError> {
    open(CUBLAS_LT, folder)?;
    // SAFETY: as above.
    if !unsafe { lt::is_culib_present() } {
        return Err(CudaError::Library { library: CUBLAS_LT, tried: "it opens, but not by its name".into() });
    }
    // SAFETY: the library is there; the call reads a constant.
    let version = unsafe { lt::cublasLtGetVersion() };
    if version < CUBLAS_LT_VERSION_MIN {
        return Err(CudaError::Version { library: CUBLAS_LT, found: version.to_string(), needed: "13.0" });
    }
    Ok(())
}

/// Opens a library from the first place that has it and keeps it open, so that looking it up by name finds it.
fn open(library: &'static str, folder: Option<&Path>) -> Result<(), CudaError> {
    let mut tried = Vec::new();
    for candidate in candidates(library, folder) {
        if candidate.is_absolute() && !candidate.exists() {
            continue;
        }
        // SAFETY: the initialisers of NVIDIA's libraries are safe to run at any time.
        match unsafe { Library::open(Some(&candidate), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(opened) => {
                tracing::debug!(library = %candidate.display(), "opened");
                // Open for as long as the process lives.
                std::mem::forget(opened);
                return Ok(());
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
                tried.push(format!("{error}{}", cause.unwrap_or_default()));
            }
        }
    }
    Err(CudaError::Library { library, tried: tried.join("; ") })
}

/// The flag's folder, the loader's own places, pip's folders, and where toolkits and containers put it.
fn candidates(library: &str, folder: Option<&Path>) -> Vec<PathBuf> {
    let usual =
        ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"];
    let mut candidates: Vec<PathBuf> = folder.map(|folder| folder.join(library)).into_iter().collect();
    candidates.push(library.into());
    candidates.extend(pip_folders(&roots()).into_iter().map(|folder| folder.join(library)));
    candidates.extend(usual.map(|folder| Path::new(folder).join(library)));
    candidates
}

/// Where Python environments live: those that are active, and those whose programs are on PATH.
fn roots() -> Vec<PathBuf> {
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).filter(|folder| folder.ends_with("bin"));
    active.chain(on_path.filter_map(|folder| folder.parent().map(Path::to_owned))).collect()
}

/// `lib*/python3*/{site,dist}-packages/nvidia/*/lib` of each root.
fn pip_folders(roots: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for root in roots {
        for lib in ["lib", "lib64", "local/lib"] {
            let pythons = entries(&root.join(lib)).into_iter().filter(|path| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
            });
            let packages = pythons.flat_map(|python| {
                ["site-packages", "dist-packages"].map(|name| python.join(name).join("nvidia"))
            });
            found.extend(packages.flat_map(|nvidia| entries(&nvidia)).map(|package| package.join("lib")));
        }
    }
    found.dedup();
    found
}

/// What is in a folder, sorted; nothing where it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pip_folders_are_found() {
        let root = std::env::temp_dir().join(format!("thalweg-pip-{}", std::process::id()));
        let lib = root.join("lib/python3.11/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).expect("a folder");
        std::fs::create_dir_all(root.join("lib/perl5/site-packages/nvidia/cu13/lib")).expect("a folder");
        assert_eq!(pip_folders(std::slice::from_ref(&root)), [lib]);
        std::fs::remove_dir_all(root).expect("removed");
    }

    #[test]
    fn the_flags_folder_comes_first() {
        let candidates = candidates("libx.so", Some(Path::new("/opt/cuda")));
        assert_eq!(candidates[..2], [PathBuf::from("/opt/cuda/libx.so"), PathBuf::from("libx.so")]);
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = open("libthalweg-none.so.1", None).expect_err("there is no such thing").to_string();
        assert!(error.contains("libthalweg-none.so.1") && error.contains("--cuda-library-path"), "{error}");
    }
}
