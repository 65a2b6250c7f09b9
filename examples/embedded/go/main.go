// Command digits holds an exported version of a model in itself, and tries it with ONNX Runtime.
package main

import (
	"bytes"
	_ "embed"
	"encoding/csv"
	"fmt"
	"log"
	"os"
	"strconv"

	ort "github.com/yalue/onnxruntime_go"
)

// What `datastore model export digits:prod model` has written beside this file.
var (
	//go:embed model/model.onnx
	model []byte
	//go:embed model/digits.csv
	table []byte
)

func main() {
	ort.SetSharedLibraryPath(os.Getenv("ONNXRUNTIME_LIBRARY"))
	if err := ort.InitializeEnvironment(); err != nil {
		log.Fatal(err)
	}
	defer ort.DestroyEnvironment()
	expected, images := examples()
	count := int64(len(expected))
	input, err := ort.NewTensor(ort.NewShape(count, 64), images)
	if err != nil {
		log.Fatal(err)
	}
	defer input.Destroy()
	output, err := ort.NewEmptyTensor[int64](ort.NewShape(count))
	if err != nil {
		log.Fatal(err)
	}
	defer output.Destroy()
	session, err := ort.NewAdvancedSessionWithONNXData(
		model, []string{"images"}, []string{"digits"}, []ort.Value{input}, []ort.Value{output}, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer session.Destroy()
	if err := session.Run(); err != nil {
		log.Fatal(err)
	}
	right := 0
	for index, digit := range output.GetData() {
		if digit == expected[index] {
			right++
		}
	}
	fmt.Printf("%d of %d digits are right\n", right, count)
}

func examples() (digits []int64, images []float32) {
	rows, err := csv.NewReader(bytes.NewReader(table)).ReadAll()
	if err != nil {
		log.Fatal(err)
	}
	for _, row := range rows {
		for index, text := range row {
			value, err := strconv.ParseFloat(text, 32)
			if err != nil {
				log.Fatal(err)
			}
			if index == 0 {
				digits = append(digits, int64(value))
			} else {
				images = append(images, float32(value))
			}
		}
	}
	return digits, images
}
