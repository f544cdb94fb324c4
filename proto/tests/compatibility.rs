//! The protocol is only ever added to: everything in the checked-in descriptor set must still be there, with the same
//! number and type. After an addition, `THALWEG_BLESS=1 cargo test -p thalweg-proto` rewrites the file.

use std::collections::BTreeSet;
use std::path::Path;

use prost::Message;
use prost_types::{DescriptorProto, EnumDescriptorProto, FileDescriptorSet};

#[test]
fn nothing_on_the_wire_was_changed_or_removed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("descriptors.bin");
    if std::env::var_os("THALWEG_BLESS").is_some() {
        std::fs::write(&path, thalweg_proto::DESCRIPTORS).expect("descriptors.bin can be written");
    }
    let landed = facts(&std::fs::read(&path).expect("descriptors.bin is checked in"));
    let current = facts(thalweg_proto::DESCRIPTORS);
    let broken: Vec<_> = landed.difference(&current).collect();
    assert!(broken.is_empty(), "these were changed or removed: {broken:#?}");
    let added: Vec<_> = current.difference(&landed).collect();
    assert!(added.is_empty(), "additions not yet in descriptors.bin, see this file's head: {added:#?}");
}

fn facts(descriptors: &[u8]) -> BTreeSet<String> {
    let set = FileDescriptorSet::decode(descriptors).expect("a descriptor set");
    let mut facts = BTreeSet::new();
    for file in &set.file {
        file.message_type.iter().for_each(|m| message(file.package(), m, &mut facts));
        file.enum_type.iter().for_each(|e| enumeration(file.package(), e, &mut facts));
        for service in &file.service {
            for m in &service.method {
                facts.insert(format!(
                    "rpc {}.{}({} stream={}) -> {} stream={}",
                    service.name(),
                    m.name(),
                    m.input_type(),
                    m.client_streaming(),
                    m.output_type(),
                    m.server_streaming()
                ));
            }
        }
    }
    facts
}

fn message(scope: &str, m: &DescriptorProto, facts: &mut BTreeSet<String>) {
    let name = format!("{scope}.{}", m.name());
    for f in &m.field {
        facts.insert(format!(
            "{name}.{} = {}: {:?} {:?} {}",
            f.name(),
            f.number(),
            f.label(),
            f.r#type(),
            f.type_name()
        ));
    }
    m.nested_type.iter().for_each(|n| message(&name, n, facts));
    m.enum_type.iter().for_each(|e| enumeration(&name, e, facts));
}

fn enumeration(scope: &str, e: &EnumDescriptorProto, facts: &mut BTreeSet<String>) {
    for value in &e.value {
        facts.insert(format!("{scope}.{}.{} = {}", e.name(), value.name(), value.number()));
    }
}
