//! Plans of products: searched once, then kept in a file.

use thalweg_worker::backend::cuda::{CudaBackendConfig, PlanSearch};

use crate::models::{config, ids, load, runner, score, tiny};

/// A first start measures and keeps plans, a second takes them, and a broken file is as good as none: the answers stay.
#[test]
fn plans_of_products_are_found_and_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = load(&tiny("llama3"));
    let tokens = ids(200, 1, 320);
    let answer = |plans: PlanSearch| {
        let mut runner = runner(&model, CudaBackendConfig { deterministic: false, plans, ..config(32) });
        score(&mut runner, &tokens)
    };
    let first_choice = answer(PlanSearch::FirstChoice);
    let kept = || {
        let files =
            std::fs::read_dir(folder.path()).expect("a folder").map(|file| file.expect("a file").path());
        let mut texts: Vec<String> =
            files.map(|path| std::fs::read_to_string(path).expect("a text")).collect();
        assert_eq!(texts.len(), 1, "one file, and nothing left beside it");
        texts.remove(0)
    };
    let check = |what: &str| {
        let found = answer(PlanSearch::Timed(Some(folder.path().to_owned())));
        let differences = found.iter().zip(&first_choice).map(|(a, b)| (a.logprob - b.logprob).abs());
        let worst = differences.fold(0f32, f32::max);
        println!("{what}: logprobs within {worst:.4} of the first choice's");
        assert!(found.len() == tokens.len() && worst < 0.1, "{what}: {worst}");
        kept()
    };
    let searched = check("searched");
    assert!(searched.lines().count() > 10, "{searched}");
    assert_eq!(check("kept"), searched, "nothing was searched again");
    let path =
        std::fs::read_dir(folder.path()).expect("a folder").next().expect("a file").expect("a file").path();
    std::fs::write(&path, &searched[..searched.len() / 2]).expect("a write");
    assert_eq!(check("broken").lines().count(), searched.lines().count());
}
